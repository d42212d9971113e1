"""Tests, in folders named as what they test.

    api/      the HTTP process against stand-ins that speak the real messages
    engine/   scheduler, tokenizer, cache, supervisor and what they share
    ops/      kernels against formulas and against each other
    shm/      rings, mailboxes, counters; C++ stress programs
    workers/  the rank: models, weights, sampling
    tools/    command line, benchmarks, package, deployment files
    e2e/      whole engines, started and killed as users would
    plugins/  a package with a family of models and a parser, installed and served
    devices/  a device that Paddle's plugin interface emulates
    page/     the web page in a browser
    grafana/  dashboards and alert rules against a Prometheus server
    golden/   small checkpoints with outputs computed by a third party
    real_models/  published models against other programs (`tools/test-models`)

Read `conftest.py` first (limits, `--fast`), then `e2e/engine_process.py`.
"""
