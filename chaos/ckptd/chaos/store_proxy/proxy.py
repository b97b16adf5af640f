"""Passes S3 requests on to a store and their answers back, but for those that a fault strikes.

Owns: what a fault does to a request. Does not own: which request (`FaultScript`), sockets and commands (`serve`). Bodies
stream: of an object no more than a few hundred KiB are in memory, whatever its size. Headers pass untouched, Host
included: the signature covers it. No request is repeated.

Invariant: what the ledger says was done before its effect could be seen; what could not be done is not in it.
"""

from __future__ import annotations

import asyncio
import hashlib
import socket
import struct
import sys
from collections.abc import AsyncIterator, Iterable
from contextlib import suppress
from typing import Self

import aiohttp
from aiohttp import web
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from ckptd.chaos.store_proxy import spoiling
from ckptd.chaos.store_proxy.ledger import Ledger
from ckptd.chaos.store_proxy.listings import Listings
from ckptd.chaos.store_proxy.wording import Call, call_of, empty_listing, refusal
from ckptd.storage_backends.fault_script import Fault, FaultKind, FaultScript, Fired, Op

READ_BYTES = 256 << 10
_OF_ONE_HOP = {
    "connection",
    "keep-alive",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "expect",
}
_AUTOMATIC = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")
_CONNECT_TIMEOUT_S = 5.0


class Proxy:
    """One store behind faults. For one event loop; an asynchronous context manager.

    Args:
        store: Base URL of the S3 service.
        ledger: Is told each fault that was done.
        seed: For probabilities and the places of wrong bits.
    """

    def __init__(self, store: str, ledger: Ledger, *, seed: int = 0) -> None:
        self._store, self._ledger, self._seed = store.rstrip("/"), ledger, seed
        self._script = FaultScript(seed=seed)
        self._listings = Listings()
        self._cleared = asyncio.Event()
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        # A connection of its own for each request: on one that is kept aiohttp would repeat a request by itself.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=_AUTOMATIC,
            read_bufsize=READ_BYTES,
        )
        self._session._retry_connection = False  # noqa: SLF001 - aiohttp has no public switch
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self._session is not None:
            await self._session.close()

    def add(self, fault: Fault) -> None:
        """Let a fault strike from now on."""
        self._script.add(fault)

    def clear(self) -> None:
        """End all faults; requests that hang are cut off."""
        self._script.clear()
        self._cleared.set()
        self._cleared = asyncio.Event()

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Serve one request, rightly or as the faults want it."""
        call = call_of(request.method, request.raw_path, request.query)
        struck = self._script.strikes(call.op, call.key) if call.op is not None else ()
        spoils = {fired.fault.kind: fired for fired in struck}
        if (fired := spoils.get(FaultKind.DELAY)) is not None:
            self._ledger.done(fired, delay_s=fired.fault.delay_s)
            await asyncio.sleep(fired.fault.delay_s)
        for fired in struck:
            answer = await self._answered(request, call, fired)
            if answer is not None:
                self._give_back(struck, but=(fired, spoils.get(FaultKind.DELAY)))
                return answer
        try:
            return await self._pass_on(request, call, spoils)
        except (aiohttp.ClientError, OSError, asyncio.IncompleteReadError) as error:
            # Store or client went away; whoever is left sees a connection that ends.
            sys.stderr.write(f"{request.method} {request.raw_path}: {type(error).__name__}: {error}\n")
            return _broken(request)

    async def _answered(self, request: web.BaseRequest, call: Call, fired: Fired) -> web.StreamResponse | None:
        """Do a fault that keeps a request from the store; None for the others."""
        kind = fired.fault.kind
        if kind is FaultKind.STALE_LIST:
            return self._stale_list(request, call, fired)
        if kind is FaultKind.PUT_LOST:
            return await self._swallow(request, fired)
        if kind is FaultKind.RESET:
            self._ledger.done(fired)
            return _broken(request)
        if kind is FaultKind.HANG:
            self._ledger.done(fired)
            # A client that gives up cancels us.
            with suppress(TimeoutError):
                await asyncio.wait_for(self._cleared.wait(), fired.fault.delay_s or None)
            return _broken(request)
        answer = refusal(kind, request.raw_path)
        if answer is None:
            return None
        status, body = answer
        self._ledger.done(fired, status=status)
        return web.Response(status=status, body=body, content_type="application/xml")

    def _stale_list(self, request: web.BaseRequest, call: Call, fired: Fired) -> web.StreamResponse:
        body = self._listings.last(request.raw_path)
        self._ledger.done(fired, remembered=body is not None)
        if body is None:
            body = empty_listing(request.path.strip("/").partition("/")[0], call.key)
        return web.Response(body=body, content_type="application/xml")

    async def _swallow(self, request: web.BaseRequest, fired: Fired) -> web.StreamResponse:
        """Take a whole body, keep nothing, and say that all is well."""
        digest, nbytes = hashlib.md5(usedforsecurity=False), 0
        async for piece in request.content.iter_any():
            digest.update(piece)
            nbytes += len(piece)
        self._ledger.done(fired, bytes=nbytes)
        return web.Response(headers={"ETag": f'"{digest.hexdigest()}"'})

    async def _pass_on(
        self, request: web.BaseRequest, call: Call, spoils: dict[FaultKind, Fired]
    ) -> web.StreamResponse:
        assert self._session is not None
        drip = spoils.get(FaultKind.DRIP)
        body: AsyncIterator[bytes] | None = request.content.iter_any() if request.can_read_body else None
        if drip is not None and call.op is Op.PUT:
            self._ledger.done(drip, bytes_per_s=drip.fault.bytes_per_s)
            body = None if body is None else spoiling.dripping(body, drip.fault.bytes_per_s)
        async with self._session.request(
            request.method,
            URL(self._store + request.raw_path, encoded=True),
            headers=_forwarded(request.headers),
            data=body,
            allow_redirects=False,
        ) as answer:
            if (fired := spoils.get(FaultKind.ANSWER_LOST)) is not None:
                if answer.ok:
                    await answer.read() if call.op is not Op.GET else answer.close()
                    self._ledger.done(fired, status=answer.status)
                    return _broken(request)
                self._script.take_back(fired)
            response = web.StreamResponse(
                status=answer.status, reason=answer.reason, headers=_forwarded(answer.headers)
            )
            if call.op is Op.LIST and answer.status == 200:
                listing = await answer.read()
                self._listings.remember(request.raw_path, listing)
                await response.prepare(request)
                await response.write(listing)
                await response.write_eof()
                return response
            return await self._stream(request, call, answer, response, spoils)

    async def _stream(
        self,
        request: web.BaseRequest,
        call: Call,
        answer: aiohttp.ClientResponse,
        response: web.StreamResponse,
        spoils: dict[FaultKind, Fired],
    ) -> web.StreamResponse:
        pieces: AsyncIterator[bytes] = answer.content.iter_any()
        length = answer.content_length or 0
        is_cut = False
        if call.op is Op.GET:
            spoiling_now = [spoils[kind] for kind in _OF_BODIES if kind in spoils]
            if not answer.ok or length == 0:
                # Nothing to spoil: it stays for the next object.
                self._give_back(spoiling_now)
                spoiling_now = []
            for fired in spoiling_now:
                match fired.fault.kind:
                    case FaultKind.CORRUPTED:
                        what = f"{call.key}/{request.headers.get('Range', '')}"
                        place, bit = spoiling.wrong_bit(self._seed, what, length)
                        self._ledger.done(fired, place=place, bit=bit, of=length)
                        pieces = spoiling.flipped(pieces, place, bit)
                    case FaultKind.TRUNCATED:
                        self._ledger.done(fired, sent=length // 2, of=length)
                        pieces, is_cut = spoiling.cut(pieces, length // 2), True
                    case _:
                        self._ledger.done(fired, bytes_per_s=fired.fault.bytes_per_s)
                        pieces = spoiling.dripping(pieces, fired.fault.bytes_per_s)
        await response.prepare(request)
        async for piece in pieces:
            await response.write(piece)
        if is_cut:
            if request.transport is not None:
                # What was sent arrives, and then the end.
                request.transport.close()
            return response
        await response.write_eof()
        return response

    def _give_back(self, struck: Iterable[Fired], *, but: Iterable[Fired | None] = ()) -> None:
        """Undo strikes that were not done."""
        done = [id(fired) for fired in but]
        for fired in struck:
            if id(fired) not in done:
                self._script.take_back(fired)


_OF_BODIES = (FaultKind.CORRUPTED, FaultKind.TRUNCATED, FaultKind.DRIP)


def _forwarded(headers: CIMultiDictProxy[str]) -> CIMultiDict[str]:
    """Return the headers of a message without those that are about the connection."""
    of_one_hop = _OF_ONE_HOP | {name.strip().lower() for name in headers.get("Connection", "").split(",")}
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in of_one_hop)


def _broken(request: web.BaseRequest) -> web.StreamResponse:
    """Reset the connection, as a machine does that forgot it; return what nobody will see."""
    transport = request.transport
    if transport is not None:
        reset(transport)
    return web.Response()


def reset(transport: asyncio.Transport) -> None:
    """End a connection with RST, whatever was still to be sent."""
    connection = transport.get_extra_info("socket")
    if connection is not None:
        # Lingering for no time at all means a reset.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()
