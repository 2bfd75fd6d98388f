"""The ASGI application of `covey serve`: /v1/models, /v1/completions and /v1/chat/completions as OpenAI has them."""

import asyncio
import hmac
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import accumulate
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from covey.rl.serving.model import Speaker, TextStream
from covey.rl.serving.requests import Asked, Limits, RequestError, read_request
from covey.rl.serving.worker import Busy, Event, Failed, Finished, Job, Stopped, Worker
from covey.rollout.engine import Completion, Group
from covey.rollout.stops import BROKEN

log = logging.getLogger(__name__)
MAX_BODY = 16 * 2**20  # bytes of a request
LOOPBACK_NAMES = ["localhost", "127.0.0.1", "::1", "[::1]"]
REASONS = {"eos": "stop", "stop": "stop", "length": "length", "abort": "stop"}
GONE = 499  # as nginx logs a client that went away; nobody reads it

Endpoint = Callable[[Request], Awaitable[Response]]


def make_app(
    speaker: Speaker, limits: Limits, *, api_key: str | None = None, max_rows: int = 64
) -> Starlette:
    """api_key: what requests must bear; without one only those count that call this machine by a loopback name, so
    that no web page can reach it through a name of its own."""
    service = _Service(speaker, limits, api_key, Worker(speaker, max_rows=max_rows))

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        service.worker.close()

    names = ["*"] if api_key is not None else LOOPBACK_NAMES
    routes = [
        Route("/v1/models", service.guarded(service.models), methods=["GET"]),
        Route("/v1/completions", service.guarded(service.completions), methods=["POST"]),
        Route("/v1/chat/completions", service.guarded(service.chat), methods=["POST"]),
    ]
    guard = Middleware(TrustedHostMiddleware, allowed_hosts=names, www_redirect=False)
    return Starlette(routes=routes, middleware=[guard], lifespan=lifespan)


class _Service:
    def __init__(self, speaker: Speaker, limits: Limits, api_key: str | None, worker: Worker):
        self.speaker, self.limits, self.worker = speaker, limits, worker
        self._bearer = None if api_key is None else f"Bearer {api_key}".encode()
        self._started = int(time.time())

    def guarded(self, endpoint: Endpoint) -> Endpoint:
        """The endpoint for those who have the key; what it raises becomes an answer."""

        async def answer(request: Request) -> Response:
            try:
                given = request.headers.get("authorization", "").encode()
                if self._bearer is not None and not hmac.compare_digest(given, self._bearer):
                    raise RequestError("the API key is missing or wrong", status=401)
                return await endpoint(request)
            except ClientDisconnect:
                return Response(status_code=GONE)
            except Exception as error:
                status, body = _failure(error)
                return JSONResponse(body, status)

        return answer

    async def models(self, request: Request) -> Response:
        card = {"id": self.speaker.name, "object": "model", "created": self._started, "owned_by": "covey"}
        card["max_model_len"] = self.speaker.max_positions
        return JSONResponse({"object": "list", "data": [card]})

    async def completions(self, request: Request) -> Response:
        return await self._complete(request, chat=False)

    async def chat(self, request: Request) -> Response:
        return await self._complete(request, chat=True)

    async def _complete(self, request: Request, *, chat: bool) -> Response:
        asked = read_request(await _body(request), self.speaker, self.limits, chat=chat)
        loop, events = asyncio.get_running_loop(), asyncio.Queue()
        job = Job(
            asked.prompts,
            asked.n,
            asked.sampling,
            lambda event: loop.call_soon_threadsafe(events.put_nowait, event),
        )
        self.worker.submit(job)
        reply = _Reply(self.speaker, asked)
        if asked.stream:
            return StreamingResponse(_stream(job, events, reply), media_type="text/event-stream")
        groups: dict[int, Group] = {}
        try:
            while len(groups) < len(asked.prompts):
                event = await events.get()
                if isinstance(event, Failed):
                    raise event.error
                if isinstance(event, Finished):
                    groups[event.place] = event.group
                elif await request.is_disconnected():
                    raise ClientDisconnect
        finally:
            job.gone = True
        return JSONResponse(reply.whole([groups[i] for i in range(len(groups))]))


async def _stream(job: Job, events: "asyncio.Queue[Event]", reply: "_Reply") -> AsyncIterator[str]:
    """Server-sent events. A client that goes away cancels this."""
    groups: list[Group] = []
    try:
        for piece in reply.openings():
            yield _sse(piece)
        while len(groups) < len(job.prompts):
            event = await events.get()
            if isinstance(event, Failed):
                yield _sse(_failure(event.error)[1])
                return
            if isinstance(event, Finished):
                groups.append(event.group)
                pieces = reply.endings(event.place, event.group)
            else:
                pieces = reply.pieces(event.place, event.sample, event.ids)
            for piece in pieces:
                yield _sse(piece)
        if reply.asked.usage:
            yield _sse(reply.frame([], usage=reply.usage(groups)))
        yield "data: [DONE]\n\n"
    finally:
        job.gone = True


def _bytes(token: str) -> list[int] | None:
    """None for a token that is a part of a character, whose text does not tell its bytes."""
    return None if BROKEN in token else list(token.encode())


def _sse(value: Any) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"


async def _body(request: Request) -> Any:
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > MAX_BODY:
            raise RequestError(f"the body has more than {MAX_BODY} bytes", status=413)
        parts.append(part)
    try:
        return json.loads(b"".join(parts))
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is no JSON ({error})") from None


def _failure(error: Exception) -> tuple[int, dict[str, Any]]:
    """Status and body of an answer that says what went wrong, as OpenAI words it."""
    if isinstance(error, RequestError):
        status, kind, message, field = error.status, "invalid_request_error", str(error), error.field
    elif isinstance(error, Busy | Stopped):
        status, kind, message, field = 503, "overloaded_error", str(error), None
    else:
        log.error("a request failed", exc_info=error)
        status, kind, message, field = 500, "server_error", "the server failed; its log says more", None
    return status, {"error": {"message": message, "type": kind, "param": field, "code": None}}


class _Reply:
    """What is answered to a request, whole or in pieces. Choice `place * n + sample` is that sample of that prompt."""

    def __init__(self, speaker: Speaker, asked: Asked):
        self.speaker, self.asked = speaker, asked
        kind = "chat.completion" if asked.chat else "text_completion"
        self._object = f"{kind}.chunk" if asked.chat and asked.stream else kind
        self._id = f"{'chatcmpl' if asked.chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        choices = len(asked.prompts) * asked.n
        self._texts = [TextStream(speaker.decode, asked.sampling.stop) for _ in range(choices)]

    def frame(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        head = {"id": self._id, "object": self._object, "created": self._created, "model": self.speaker.name}
        return {**head, "choices": choices, **more}

    def whole(self, groups: list[Group]) -> dict[str, Any]:
        completions = [completion for group in groups for completion in group.completions]
        choices = [self._choice(i, completion) for i, completion in enumerate(completions)]
        return self.frame(choices, usage=self.usage(groups))

    def usage(self, groups: list[Group]) -> dict[str, int]:
        """Each prompt counts once, and the tokens that end a completion count."""
        prompt = sum(len(group.prompt.ids) for group in groups)
        new = sum(len(completion.ids) for group in groups for completion in group.completions)
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}

    def openings(self) -> list[dict[str, Any]]:
        if not self.asked.chat:
            return []
        delta = {"role": "assistant", "content": ""}
        return [self._piece(i, {"delta": delta}, None) for i in range(len(self._texts))]

    def pieces(self, place: int, sample: int, ids: Any) -> list[dict[str, Any]]:
        index = place * self.asked.n + sample
        text = self._texts[index].add(ids)
        return [self._piece(index, self._delta(text), None)] if text else []

    def endings(self, place: int, group: Group) -> list[dict[str, Any]]:
        first = place * self.asked.n
        return [
            self._piece(i, self._delta(self._texts[i].end(completion.text)), REASONS[completion.finish])
            for i, completion in enumerate(group.completions, first)
        ]

    def _piece(self, index: int, content: dict[str, Any], reason: str | None) -> dict[str, Any]:
        return self.frame([{"index": index, **content, "logprobs": None, "finish_reason": reason}])

    def _delta(self, text: str) -> dict[str, Any]:
        if not self.asked.chat:
            return {"text": text}
        return {"delta": {"content": text} if text else {}}

    def _choice(self, index: int, completion: Completion) -> dict[str, Any]:
        answer = {"role": "assistant", "content": completion.text}
        content = {"message": answer} if self.asked.chat else {"text": completion.text}
        logprobs = self._logprobs(completion) if self.asked.logprobs else None
        return {
            "index": index,
            **content,
            "logprobs": logprobs,
            "finish_reason": REASONS[completion.finish],
        }

    def _logprobs(self, completion: Completion) -> dict[str, Any]:
        """Of the sampled tokens, before truncation and penalties; without a last one that only ends the text."""
        values = completion.full_logprobs or completion.logprobs
        kept = [
            (token, value)
            for token, value in zip(completion.ids, values, strict=True)
            if token not in self.speaker.eos
        ]
        names = [self.speaker.decode([token]) for token, _ in kept]
        if self.asked.chat:
            content = [
                {"token": name, "logprob": value, "bytes": _bytes(name), "top_logprobs": []}
                for name, (_, value) in zip(names, kept, strict=True)
            ]
            return {"content": content, "refusal": None}
        offsets = list(accumulate(map(len, names), initial=0))[:-1]
        values = [value for _, value in kept]
        return {
            "tokens": names,
            "token_logprobs": values,
            "top_logprobs": None,
            "text_offset": offsets,
        }
