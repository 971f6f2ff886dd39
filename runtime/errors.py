"""Errors that a user can act on. `exit_code` is what the command line answers with (see docs: 0 done, 1 failed, 2 wrong request)."""

from __future__ import annotations


class CompressError(Exception):
    """The work failed for a reason the message states in one sentence."""

    exit_code = 1


class RequestError(CompressError, ValueError):
    """The request was wrong: bad path, bad value, impossible combination. The message says what, where, and what is allowed."""

    exit_code = 2


class ResourceError(RequestError):
    """The request is right and cannot be carried out here and now: too little free memory or disk, or another process is in the way."""


class ArtifactError(RequestError):
    """A checkpoint or artifact on disk cannot be used: missing, corrupt, unsafe or written by a newer version."""


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its class where it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
