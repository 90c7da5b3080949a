"""Hours of random epochs under faults: `make soak`, or `python -m tests.soak --minutes 60`.

    driver: S3 server that fails ─┬─▶ resident: one trainer that lives all the time, measured each epoch
            changes of the bucket └─▶ runs: trainers that are killed, and resumed with other workers and ranks

`world` has the bucket and the server, `run` one run of several legs with its oracle, `trainer` the process of
one rank, `resident` the long-lived trainer, `growth` what has grown, and the chart.
"""
