"""Registers the dialect `sagemaker`."""

from lmkit.api import DialectSpec, hookimpl


@hookimpl
def lmkit_dialects():
    yield DialectSpec(
        name="sagemaker",
        summary="the routes of SageMaker: /ping, and /invocations for whatever the model does",
        target="lmkit_dialect_sagemaker.dialect:SageMaker",
    )
