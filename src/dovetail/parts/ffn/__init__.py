"""Feed-forward networks: MLP, GLU, MoE and its routers. Each token is processed by itself."""
