"""Model versions on a peer: which to trust, where they lie, how they are fetched and served."""
