"""A version as its lossless difference from the version before. See `block` and `delta_file`."""
