"""A runner for each kind of device over one core (`engine/runner.py`): what it puts together is a page. Read `cpu.py`."""
