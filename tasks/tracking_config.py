"""The section of a run file that says where a run is tracked. No mlflow import: the command line validates with it."""

import re
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from planning.config import Section

TRACKING_SCHEMES = ("sqlite", "http", "https")


class TrackingConfig(Section):
    """MLflow, as a SQLite file or as a tracking server (which keeps its runs in PostgreSQL, for many writers)."""

    mlflow_uri: Annotated[str, Field(title="MLflow: sqlite:///file, or http(s):// address of a tracking server")] = (
        "sqlite:///mlflow.db"
    )
    experiment: Annotated[str, Field(min_length=1, title="MLflow experiment")] = "lobra"
    enabled: Annotated[bool, Field(title="Track the run in MLflow")] = True
    register_adapters: Annotated[bool, Field(title="Register adapters that passed their probe")] = True
    parent_run_id: Annotated[str | None, Field(title="MLflow run that this run is nested in")] = None
    registry_alias: Annotated[
        str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]{0,99}$", title="Alias of a tenant's newest good adapter")
    ] = "champion"

    @field_validator("mlflow_uri")
    @classmethod
    def _a_store_that_lasts(cls, uri: str) -> str:
        scheme = urlsplit(uri).scheme
        if scheme not in TRACKING_SCHEMES:
            raise ValueError(
                f"MLflow store {uri!r} is not supported (plain folders are MLflow's retired file store); "
                "give sqlite:///mlflow.db or the http(s):// address of a tracking server"
            )
        return uri

    @field_validator("registry_alias")
    @classmethod
    def _an_alias_that_mlflow_takes(cls, alias: str) -> str:
        if alias.lower() == "latest" or re.fullmatch(r"[vV]\d+", alias):
            raise ValueError(f"MLflow reserves the alias {alias!r}; choose another, for instance champion")
        return alias
