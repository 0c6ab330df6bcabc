"""The webhook: each act of the journal as a POST to an address of the operator's, in order, at least once.

Knows: which kinds are wanted, how far the receiver has got (a cursor in the ledger), how a message is signed.
Does not know: what an act means. A receiver that is gone, slow or unwilling costs learning nothing: its acts wait in
the journal, and the next try comes after a longer pause, up to a minute. Redirects are not followed.

- 2xx: taken. A crash between that and the cursor sends the act again: `seq` tells a receiver that it knows it.
- `x-reef-signature: sha256=<hex>` is the HMAC-SHA256 of the body's bytes under the secret.
- The address may be a secret of its own: logs and errors name its host only.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
from collections.abc import Collection, Mapping
from typing import Any, Final
from urllib.parse import urlsplit

import reef
from reef.config.settings import refused
from reef.core.errors import ConfigError, WireError
from reef.core.failpoint import failpoint
from reef.core.nouns import Act
from reef.engines.http import Broken, Client, Unreachable
from reef.loop.binding import Tools
from reef.records.journal import shown

SECONDS: Final = 10.0
"""For one message, from connecting to the status."""
PAGE: Final = 100


class Webhook:
    """`secret` None: messages are not signed. `wanted`: whether one is configured, so that nothing goes out unsigned
    because a variable was forgotten."""

    def __init__(
        self,
        tools: Tools,
        url: str,
        kinds: Collection[str],
        *,
        secret: str | None = None,
        wanted: str | None = None,
        seconds: float = SECONDS,
    ) -> None:
        self._tools = tools
        self._url, self._parts = url, urlsplit(url)
        self._kinds, self._secret, self._wanted = frozenset(kinds), secret, wanted
        self._seconds = seconds
        self._sent = 0

    async def look(self) -> bool:
        """Send what the receiver has not got. True when more may be waiting. WireError when it does not take it."""
        self._check()
        cursor = await self._cursor()
        acts = await asyncio.to_thread(self._tools.journal.after, cursor, PAGE)
        for act in acts:
            if act.kind in self._kinds:
                await self._send(act)
                failpoint("loop.after_send")
                self._advance(act.seq)
                failpoint("loop.after_sent")
                self._sent += 1
        if acts and acts[-1].kind not in self._kinds:
            self._advance(acts[-1].seq)
        return len(acts) == PAGE

    def shown(self) -> dict[str, Any]:
        return {"host": self._parts.hostname, "sent": self._sent}

    def _check(self) -> None:
        if (why := refused(self._parts.geturl())) is not None:
            raise ConfigError(f"observability.webhook.url {why}")
        if self._wanted is not None and not self._secret:
            raise ConfigError(
                f"the environment variable {self._wanted} is empty, so the webhook's messages cannot be signed; set it "
                "where `reef serve` starts, or remove observability.webhook.secret_env"
            )

    async def _cursor(self) -> int:
        """The newest act that is done with. A webhook that is new begins with what happens from now on."""
        kept = self._tools.ledger.cursor("", "webhook")  # one more than the act's number: 0 says there is none yet
        if kept == 0:
            kept = 1 + await asyncio.to_thread(self._tools.journal.last)
            self._tools.ledger.advance("", "webhook", kept)
        return kept - 1

    def _advance(self, seq: int) -> None:
        self._tools.ledger.advance("", "webhook", seq + 1)

    async def _send(self, act: Act) -> None:
        body = json.dumps(shown(act), ensure_ascii=False, separators=(",", ":")).encode()
        client = Client(self._url, connect=self._seconds, idle=self._seconds)
        target = (self._parts.path or "/") + (f"?{self._parts.query}" if self._parts.query else "")
        try:
            async with asyncio.timeout(self._seconds):
                response = await client.send(client.head("POST", target, self._headers(act, body)), body)
            status = response.status
        except (Unreachable, Broken) as error:
            raise self._failed(error.kind) from None
        except TimeoutError:
            raise self._failed(f"no answer within {self._seconds:g} seconds") from None
        finally:
            client.close()
        if not 200 <= status < 300:
            raise self._failed(f"it answered {status}")

    def _headers(self, act: Act, body: bytes) -> Mapping[str, str]:
        headers = {
            "content-type": "application/json",
            "user-agent": f"reef/{reef.__version__}",
            "x-reef-kind": act.kind,
            "x-reef-seq": str(act.seq),
        }
        if self._secret:
            signature = hmac.new(self._secret.encode(), body, hashlib.sha256).hexdigest()
            headers["x-reef-signature"] = f"sha256={signature}"
        return headers

    def _failed(self, why: str) -> WireError:
        return WireError(f"the webhook at {self._parts.hostname} was not delivered ({why}); it is tried again")
