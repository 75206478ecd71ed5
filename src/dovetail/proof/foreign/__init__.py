"""Laws on models that are not built from a spec: any class of transformers, any `nn.Module`."""
