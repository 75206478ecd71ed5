"""Files: specs and YAML, model directories, tensors; every file is read as untrusted input."""
