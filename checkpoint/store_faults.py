"""Sorts what the clients of remote stores raise into this project's errors: transient, permanent, conflict.

Called by `store_remote` and `store_s3`. Knows S3's error codes; performs nothing.
"""

from __future__ import annotations

import asyncio
from typing import Final

from everstep.checkpoint.errors import (
    ObjectExists,
    ObjectMissing,
    ObjectTooShort,
    PermanentStoreError,
    StoreDenied,
    StoreError,
    TransientStoreError,
)

_S3_TRANSIENT: Final = {
    *[
        "RequestTimeout",
        "SlowDown",
        "InternalError",
        "ServiceUnavailable",
        "Throttling",
        "ThrottlingException",
    ],
    *["RequestTimeTooSkewed", "OperationAborted", "BadDigest", "XAmzContentSHA256Mismatch", "IncompleteBody"],
    *["ConditionalRequestConflict", "500", "502", "503", "504", "429", "408", "409"],
}
_S3_EXISTS: Final = {"PreconditionFailed", "412"}
_S3_MISSING: Final = {"NoSuchKey", "404", "NotFound", "NoSuchUpload"}
_S3_DENIED: Final = {
    *[
        "AccessDenied",
        "InvalidAccessKeyId",
        "SignatureDoesNotMatch",
        "ExpiredToken",
        "InvalidToken",
        "403",
        "401",
    ],
    *["AllAccessDisabled", "AccountProblem", "AuthorizationHeaderMalformed", "TokenRefreshRequired"],
}


def classify(url: str, key: str, error: Exception) -> StoreError:
    """The StoreError for what a client library raised: by S3's error code, else by the kind of the exception."""
    cause: BaseException | None = error
    while cause is not None and not hasattr(cause, "response"):
        cause = cause.__cause__
    response = getattr(cause, "response", None)
    where = f"{url}: {key}" if key else url
    if isinstance(response, dict):
        code = str(response.get("Error", {}).get("Code", ""))
        status = str(response.get("ResponseMetadata", {}).get("HTTPStatusCode", ""))
        message = str(response.get("Error", {}).get("Message", ""))[:200]
        kind = kind_of(code, status)
        if code == "NoSuchBucket":
            return PermanentStoreError(f"{url}: the bucket does not exist.")
        return kind(f"{where}: {code or status}: {message.rstrip('.')}.")
    text = f"{where}: {type(error).__name__}: {str(error)[:200].rstrip('.')}."
    if isinstance(error, FileExistsError):
        return ObjectExists(text)
    if isinstance(error, FileNotFoundError):
        return ObjectMissing(text)
    if isinstance(error, PermissionError) or "Credentials" in type(error).__name__:
        return StoreDenied(text)
    if isinstance(error, ConnectionError | TimeoutError | asyncio.TimeoutError | OSError):
        return TransientStoreError(text)
    module = type(error).__module__.partition(".")[0]
    if module in ("aiohttp", "botocore", "aiobotocore", "urllib3") and not _is_caller_fault(error):
        return TransientStoreError(text)
    return PermanentStoreError(text)


def _is_caller_fault(error: Exception) -> bool:
    return type(error).__name__ in {
        *[
            "ParamValidationError",
            "InvalidEndpointDiscoveryConfigurationError",
            "NoRegionError",
            "InvalidURL",
        ],
        *["PartialCredentialsError", "ProfileNotFound", "UnknownServiceError", "InvalidRegionError"],
    }


def kind_of(code: str, status: str = "") -> type[StoreError]:
    """The kind of error that an S3 error code, or else an HTTP status, stands for."""
    kinds: tuple[tuple[set[str], type[StoreError]], ...] = (
        (_S3_EXISTS, ObjectExists),
        (_S3_MISSING, ObjectMissing),
        ({"InvalidRange", "416"}, ObjectTooShort),
        (_S3_DENIED, StoreDenied),
        (_S3_TRANSIENT, TransientStoreError),
    )
    for word in (code, status):
        for codes, kind in kinds:
            if word in codes:
                return kind
    return TransientStoreError if status.startswith("5") else PermanentStoreError
