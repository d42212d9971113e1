"""What several replicas and ranks decide together, as pure functions: `placement.py` says which rank computes which experts,
`eplb.py` when and how they move."""
