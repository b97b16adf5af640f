"""Where S3 is and who we are there, from the usual places.

Owns the reading of environment, profile files (``~/.aws/config``, ``~/.aws/credentials``,
AWS_PROFILE), web identity and instance role, all through botocore, so that whatever works for
the vendor's tools works here; and the renewal of credentials. Both S3 drivers use it. Invariant:
no credential is kept longer than a minute beyond what its source says now.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from .errors import InvalidUrl, PermissionDenied

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["S3Credentials", "S3Settings", "s3_settings"]

# How long obstore may use what it was given before it asks again. botocore renews temporary
# credentials 15 minutes before they end; files are read again, as a login may have renewed them.
_TTL = timedelta(minutes=1)
_DEFAULT_REGION = "us-east-1"


@dataclass(frozen=True, kw_only=True, slots=True)
class S3Settings:
    """Where S3 is.

    Attributes:
        endpoint: Base URL; None for the vendor's own.
        region: Signing region.
        profile: Name in the profile files; None for the default.
        ca_bundle: File with further root certificates; None for the system's.
    """

    endpoint: str | None
    region: str
    profile: str | None
    ca_bundle: str | None


class S3Credentials:
    """Credentials of one profile, looked up again when due; callable from many threads.

    An instance is an obstore credential provider.

    Args:
        profile: Name in the profile files; None for the default chain.
    """

    def __init__(self, profile: str | None) -> None:
        self._profile = profile
        self._lock = threading.Lock()
        self._found: Any = None
        self._found_at = 0.0

    def __call__(self) -> dict[str, Any]:
        """Return key, secret and token, and when to ask again.

        Raises:
            PermissionDenied: There are none, in any of the usual places.
        """
        frozen = self._current().get_frozen_credentials()
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": datetime.now(UTC) + _TTL,
        }

    def _current(self) -> Any:
        from botocore.credentials import (  # type: ignore[import-untyped] # noqa: PLC0415 - slow import
            RefreshableCredentials,
        )

        with self._lock:
            due = time.monotonic() - self._found_at >= _TTL.total_seconds()
            # Refreshable ones renew themselves; the others stand still unless looked up again.
            if self._found is None or (due and not isinstance(self._found, RefreshableCredentials)):
                self._found = _session(self._profile).get_credentials()
                self._found_at = time.monotonic()
            if self._found is None:
                raise PermissionDenied(
                    "no S3 credentials found",
                    hint="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or an instance role",
                )
            return self._found


def s3_settings(options: Mapping[str, str]) -> S3Settings:
    """Read endpoint, region and certificates; options win over environment over profile.

    Args:
        options: May hold "endpoint_url", "region" and "profile".

    Raises:
        InvalidUrl: The profile does not exist, or the endpoint is no http(s) URL.
    """
    from botocore.configprovider import (  # type: ignore[import-untyped] # noqa: PLC0415 - slow import
        ConfiguredEndpointProvider,
    )
    from botocore.exceptions import BotoCoreError  # type: ignore[import-untyped] # noqa: PLC0415

    profile = options.get("profile")
    session = _session(profile)
    try:
        configured = ConfiguredEndpointProvider(
            full_config=session.full_config,
            scoped_config=session.get_scoped_config(),
            client_name="s3",
            environ=os.environ,
        ).provide()
        # botocore itself does not read AWS_REGION, but every newer SDK does.
        region = options.get("region") or os.environ.get("AWS_REGION") or session.get_config_variable("region")
        ca_bundle = session.get_config_variable("ca_bundle")
    except BotoCoreError as error:
        raise InvalidUrl(
            f"the AWS profile cannot be read: {error}", hint="check AWS_PROFILE and ~/.aws/config"
        ) from error
    endpoint = options.get("endpoint_url") or configured
    if endpoint and not endpoint.startswith(("http://", "https://")):
        raise InvalidUrl(f"the S3 endpoint {endpoint!r} is no http(s) URL", hint="correct AWS_ENDPOINT_URL")
    return S3Settings(
        endpoint=endpoint.rstrip("/") if endpoint else None,
        region=region or _DEFAULT_REGION,
        profile=profile,
        ca_bundle=ca_bundle,
    )


def _session(profile: str | None) -> Any:
    import botocore.session  # type: ignore[import-untyped] # noqa: PLC0415 - slow import

    return botocore.session.Session(profile=profile)
