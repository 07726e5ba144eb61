"""What the command line does, one module a command or a part of one. `cli` has the options."""
