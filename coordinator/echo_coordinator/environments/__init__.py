"""Where prompts come from and what a completion is worth. `base` is the seam, `registry` finds by name."""
