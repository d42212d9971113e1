"""What a person runs: `serve` and `test` (bash), and the console script `tokamak` (`cli.py` first).

cli.py        subcommands, each imported on demand
serving.py    the launcher, with the embedded model
ctl.py        looks and orders from the shell
top/          live screen over the counters
chat/         talk to the model in the terminal
launch.py     coding agents, started with a running engine
models.py     what models are on this machine
batch/        the requests in a file, answered in another
package/      what a user imports: `tokamak`
bench/        load generator, and the shared-memory benchmark
clients/      other people's clients against a server, each in its environment (`test-clients`)
demo/         the embedded model: its data, training, examination and weights
package/      `tokamak`, the package that a wheel has at its top
deploy/       image, compose, systemd, Kubernetes
"""
