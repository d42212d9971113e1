"""What a person runs: `serve` and `test` (bash), and the console script `tokamak` (`cli.py` first).

cli.py        subcommands, each imported on demand
ctl.py        looks and orders from the shell
top.py        live screen over the counters (snapshot.py, observer.py, figures.py, screen.py)
chat.py       talk to the model in the terminal
bench/        load generator, and the shared-memory benchmark
demo/         the embedded model: its data, training, examination and weights
"""
