"""Every error that the product raises on purpose. The command line turns them into exit codes.

Messages name the field, file, row or configuration that is wrong and what to do about it.
"""


class LobraError(Exception):
    """The run failed: exit code 1."""


class InputError(LobraError):
    """Something the user gave is wrong: exit code 2, nothing half-written."""


class PlanInfeasibleError(InputError):
    """No deployment of the cluster can hold the tenants' sequences."""


class ProfileError(InputError):
    """A profile file is damaged, or belongs to another model."""


class PlanError(LobraError):
    """A step plan would lose, double or misplace sequences. A defect of the planner, never of the user's input."""
