"""The public Python functions, one file per function. Every verb of the command line calls the function of its name."""
