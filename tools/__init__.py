"""Programs that a person runs: `serve` and `test` (bash), and the console script `tokamak` (`cli.py` first).

top/        live screen over the counters
chat/       talk to the model in the terminal
batch/      run the requests of a file, write their answers to another
calibrate/  statistics of a model over a text, for rounding its weights
trace/      what every actor did, for ui.perfetto.dev
bench/      load generator, comparisons with other engines, benchmarks of steps and shared memory
package/    `tokamak`, the package that users import
demo/       the embedded model: its data, training, examination and weights
deploy/     image, compose, systemd, Kubernetes
grafana/    dashboards and alert rules
device/     checks that need a card (`tools/test --device`, `tools/device/card`)
clients/    other people's clients against a server, each in its environment (`tools/test-clients`)
sanitized/  start hook for native code built with sanitizers (`tools/test --sanitize`)

cli.py          subcommands, each imported on demand
serving.py      the launcher, with the embedded model
ctl.py          status and commands from the shell
launch.py       coding agents, started with a running engine
models.py       models on this machine
"""
