"""What several replicas and ranks decide together, as pure functions: `routing.py` says which replica a prompt goes to,
`placement.py` which rank computes which experts, `eplb.py` when and how they move."""
