"""What every room stands on: errors, limits, declared options of functions, this process and this machine. No tensors."""
