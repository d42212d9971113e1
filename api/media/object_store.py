"""Signs links to objects of a store: `s3://bucket/key` and `bos://bucket/key` become https links that are valid for a while
(AWS Signature Version 4, query parameters).

Used by `download.py` in the api process. Keys come with the configuration.
"""

from __future__ import annotations

import hashlib
import hmac
from datetime import datetime
from urllib.parse import quote, urlsplit

import msgspec

from engine.config import EngineConfig

SCHEMES = ("s3", "bos")
EXPIRES_S = 300
ANY_BUCKET = "*"
_ENDPOINTS = {"s3": "https://s3.{region}.amazonaws.com", "bos": "https://s3.{region}.bcebos.com"}
_REGIONS = {"s3": "us-east-1", "bos": "bj"}


class ObjectStore(msgspec.Struct, frozen=True):
    endpoint: str
    region: str
    access_key: str
    secret_key: str
    session_token: str
    allowed_buckets: tuple[str, ...] = ()  # BUCKET or BUCKET/PREFIX

    @staticmethod
    def of(config: EngineConfig) -> ObjectStore:
        return ObjectStore(
            config.object_store_endpoint,
            config.object_store_region,
            config.object_store_access_key,
            config.object_store_secret_key,
            config.object_store_session_token,
            config.allowed_object_buckets,
        )

    def is_allowed(self, bucket: str, key: str) -> bool:
        """Return whether clients may read an object."""
        for allowed in self.allowed_buckets:
            name, _, prefix = allowed.partition("/")
            if name in (bucket, ANY_BUCKET) and key.startswith(prefix):
                return True
        return False


def presigned(store: ObjectStore, scheme: str, bucket: str, key: str, now: datetime) -> str:
    """Return the link of an object, in path style. `now`: UTC."""
    region = store.region or _REGIONS[scheme]
    endpoint = store.endpoint or _ENDPOINTS[scheme].format(region=region)
    link = f"{endpoint.rstrip('/')}/{quote(bucket, safe='-_.~')}/{quote(key, safe='/-_.~')}"
    return signed(link, store, region, now, EXPIRES_S)


def signed(link: str, store: ObjectStore, region: str, now: datetime, expires_s: int) -> str:
    """Return a link (without a query) with a query that signs it."""
    parts = urlsplit(link)
    day, moment = now.strftime("%Y%m%d"), now.strftime("%Y%m%dT%H%M%SZ")
    scope = f"{day}/{region}/s3/aws4_request"
    parameters = {
        "X-Amz-Algorithm": "AWS4-HMAC-SHA256",
        "X-Amz-Credential": f"{store.access_key}/{scope}",
        "X-Amz-Date": moment,
        "X-Amz-Expires": str(expires_s),
        "X-Amz-SignedHeaders": "host",
    }
    if store.session_token:
        parameters["X-Amz-Security-Token"] = store.session_token
    query = "&".join(f"{name}={quote(parameters[name], safe='-_.~')}" for name in sorted(parameters))
    canonical = f"GET\n{parts.path}\n{query}\nhost:{parts.netloc}\n\nhost\nUNSIGNED-PAYLOAD"
    to_sign = f"AWS4-HMAC-SHA256\n{moment}\n{scope}\n{hashlib.sha256(canonical.encode()).hexdigest()}"
    signing_key = f"AWS4{store.secret_key}".encode()
    for part in scope.split("/"):
        signing_key = hmac.digest(signing_key, part.encode(), "sha256")
    return f"{link}?{query}&X-Amz-Signature={hmac.digest(signing_key, to_sign.encode(), 'sha256').hex()}"
