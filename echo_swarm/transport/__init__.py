"""Streams between peers: the seam (`base`), framed calls over it (`rpc`), and its implementations."""
