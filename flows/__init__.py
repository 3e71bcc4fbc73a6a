"""Prefect flows, their parameters and the command line.

Importing the package switches off the usage statistics of Prefect and MLflow, for this process and its children.
"""

import os

for _switch, _value in {
    "DO_NOT_TRACK": "true",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}.items():
    os.environ.setdefault(_switch, _value)
