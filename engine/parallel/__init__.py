"""What several replicas and ranks decide together, as pure functions: `routing.py` says which replica a prompt goes to."""
