"""Every error that the product raises on purpose. The command line turns them into exit codes.

Messages name the field, file, row or configuration that is wrong and what to do about it.
"""


class LobraError(Exception):
    """The run failed: exit code 1."""


class InputError(LobraError):
    """Something the user gave is wrong: exit code 2, nothing half-written."""


class PlanInfeasibleError(InputError):
    """No deployment of the cluster can hold the tenants' sequences."""
