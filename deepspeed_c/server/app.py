"""The routes of the server."""

from __future__ import annotations

import asyncio
import functools
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from fastapi import APIRouter, Depends, FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from deepspeed_c._version import __version__
from deepspeed_c.errors import ModelError, StateError
from deepspeed_c.inference.v2 import SchedulingError
from deepspeed_c.logging import logger
from deepspeed_c.server.chat import render, template_of
from deepspeed_c.server.chats import ChatWriter
from deepspeed_c.server.completions import CompletionWriter
from deepspeed_c.server.errors import RequestRefused, error_object
from deepspeed_c.server.fields import (
    Bounds,
    Chat,
    SamplingFields,
    Texts,
    decode_body,
    read_chat,
    read_completion,
    read_texts,
    read_tokens,
)
from deepspeed_c.server.generation import RequestAnswers
from deepspeed_c.server.limits import ApiKeys, Gate, ServerSettings
from deepspeed_c.server.metrics import Metrics
from deepspeed_c.server.model import ServedModel
from deepspeed_c.server.replies import Reply, ReplyWriter, TokenNames
from deepspeed_c.server.sending import EventStream, JsonResponse, read_body, refusal, until_gone
from deepspeed_c.server.structured import TokenGrammar, grammar_of, grammar_of_tools, make_tables
from deepspeed_c.server.tools import hidden_tag, parser_of
from deepspeed_c.serving import SamplingParams
from deepspeed_c.serving.sampling import Grammar

__all__ = ["make_app"]

# Route of OpenAI's API -> the field that asks for what is not done here.
_ELSEWHERE = {
    "/v1/embeddings": ("input", "embeddings are not computed"),
    "/v1/responses": ("input", "this form of requests is not read; send messages to /v1/chat/completions"),
    "/v1/images/generations": ("prompt", "images are not made"),
    "/v1/images/edits": ("image", "images are not read"),
    "/v1/audio/speech": ("input", "audio is not made"),
    "/v1/audio/transcriptions": ("file", "audio is not read"),
    "/v1/audio/translations": ("file", "audio is not read"),
    "/v1/moderations": ("input", "texts are not judged"),
    "/v1/files": ("file", "files are not kept"),
    "/v1/batches": ("input_file_id", "files are not kept"),
}
_CLIENT_GONE = 499  # nginx's number; nobody reads it


def make_app(model: ServedModel, settings: ServerSettings) -> FastAPI:
    """The application for a model that has been started. ``app.state.gate`` counts its requests.

    Tables for forms of answers are made here, so that no request waits for them.
    """
    server = _Server(model, settings)
    make_tables(model.tokenizer, server.bounds.n_words, server.bounds.ends)
    app = FastAPI(title="deepspeed_c", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.gate = server.gate
    _add_routes(app, server)
    for kind in (RequestRefused, HTTPException, ClientDisconnect, Exception):
        app.add_exception_handler(kind, server.failed)
    if settings.cors:
        app.add_middleware(CORSMiddleware, **dict(settings.cors))  # type: ignore[arg-type]
    return app


def _add_routes(app: FastAPI, server: _Server) -> None:
    guarded = APIRouter(dependencies=[Depends(server.check_key)])
    for path, route in (
        ("/v1/completions", server.complete),
        ("/v1/chat/completions", server.chat),
        ("/tokenize", server.tokenize),
        ("/detokenize", server.detokenize),
    ):
        guarded.add_api_route(path, route, methods=["POST"])
    for path in _ELSEWHERE:
        guarded.add_api_route(path, server.refuse, methods=["GET", "POST"])
    guarded.add_api_route("/v1/models", server.list_models, methods=["GET"])
    guarded.add_api_route("/v1/models/{name:path}", server.show_model, methods=["GET"])
    app.include_router(guarded)
    for path, route in (
        ("/health", server.health),
        ("/ready", server.ready),
        ("/metrics", server.show_metrics),
        ("/version", server.version),
    ):
        app.add_api_route(path, route, methods=["GET"])


class _Prepared(NamedTuple):
    prompts: list[list[int]]
    writer: ReplyWriter
    form: TokenGrammar | None
    """Of each answer; None: any text."""
    shown: tuple[tuple[int, str], ...] = ()
    """Special tokens whose text is part of answers."""


class _Server:
    """The work behind the routes."""

    def __init__(self, model: ServedModel, settings: ServerSettings) -> None:
        self.model, self.settings = model, settings
        self.names = settings.names or (model.name,)
        self.bounds = Bounds(
            n_words=model.n_words,
            max_model_len=model.max_model_len,
            ends=model.ends,
            max_n=settings.max_n,
            max_logprobs=settings.max_logprobs,
            rules=settings.rules,
        )
        self.keys = ApiKeys(settings.keys)
        self.gate = Gate(settings)
        self.metrics = Metrics(model)
        self.token_names = TokenNames(model.tokenizer)

    async def check_key(self, request: Request) -> None:
        request.scope["owner"] = self.keys.owner(request.headers.get("authorization"))

    async def complete(self, request: Request) -> Response:
        wish = read_completion(await self._body(request), self.bounds)
        self._check_model(wish.sampling.model)

        def prepare() -> _Prepared:
            prompts = [
                self.model.encode(each, special=wish.special) if isinstance(each, str) else [*each]
                for each in wish.prompts
            ]
            echoed = [each if isinstance(each, str) else self.model.decode(each) for each in wish.prompts]
            writer = CompletionWriter(
                self._head("cmpl", wish.sampling), wish.sampling, self.token_names, echoed if wish.echo else []
            )
            return _Prepared(prompts, writer, self._form(wish.sampling))

        return await self._answer(
            request, wish.sampling, len(wish.prompts), prepare, ("prompt", "max_tokens"), continues=True
        )

    async def chat(self, request: Request) -> Response:
        wish = read_chat(await self._body(request), self.bounds)
        self._check_model(wish.sampling.model)
        tokenizer, n_words = self.model.tokenizer, self.bounds.n_words
        tools = None if wish.tool_choice == "none" else wish.tools

        def prepare() -> _Prepared:
            parser = parser_of(template_of(tokenizer, tools, self.settings.chat_template)) if tools else None
            of_tools = grammar_of_tools(
                tools,
                wish.tool_choice,
                parser,
                tokenizer,
                n_words,
                self.bounds.ends,
                is_parallel=wish.parallel_tool_calls,
            )
            form = self._form(wish.sampling)
            if form is not None and of_tools is not None:
                raise RequestRefused(
                    "a tool must be called, and another field gives a form as well",
                    param="tool_choice",
                    fix='write "auto", or leave the form out',
                )
            text = self._render(wish, wish.messages, tools)
            writer = ChatWriter(
                self._head("chatcmpl", wish.sampling), wish, self.token_names, self.settings.response_role, parser
            )
            shown = () if parser is None else hidden_tag(parser, tokenizer)
            return _Prepared([self.model.encode(text, special=wish.special)], writer, of_tools or form, shown)

        fields = ("messages", "max_completion_tokens")
        return await self._answer(request, wish.sampling, 1, prepare, fields, continues=wish.continue_final_message)

    async def tokenize(self, request: Request) -> Response:
        wish = read_texts(await self._body(request))
        self._check_model(wish.model)

        def encode() -> list[int]:
            is_chat = wish.messages is not None
            text = self._render(wish, wish.messages, wish.tools) if wish.messages is not None else wish.prompt or ""
            return self.model.encode(text, special=not is_chat if wish.special is None else wish.special)

        tokens = await asyncio.to_thread(encode)
        names = self.model.tokenizer.convert_ids_to_tokens(tokens) if wish.token_strings else None
        found = {"count": len(tokens), "max_model_len": self.model.max_model_len, "tokens": tokens, "token_strs": names}
        return JsonResponse(found)

    async def detokenize(self, request: Request) -> Response:
        wish = read_tokens(await self._body(request), self.bounds)
        self._check_model(wish.model)
        return JsonResponse({"prompt": self.model.decode(wish.tokens, special=True)})

    async def refuse(self, request: Request) -> Response:
        param, what = _ELSEWHERE[request.url.path]
        raise RequestRefused(what, param=param, fix="ask a server that does it")

    async def list_models(self) -> Response:
        return JsonResponse({"object": "list", "data": [self._card(name) for name in self.names]})

    async def show_model(self, name: str) -> Response:
        self._check_model(name)
        return JsonResponse(self._card(name))

    async def health(self) -> Response:
        """Whether the engine lives."""
        if self.model.is_alive:
            return JsonResponse({"status": "ok"})
        return JsonResponse({"status": "dead", "error": self.model.why_dead}, 503)

    async def ready(self) -> Response:
        """Whether new requests are taken."""
        if self.model.is_alive and not self.gate.is_draining:
            return JsonResponse({"status": "ready"})
        return JsonResponse({"status": "draining" if self.gate.is_draining else "dead"}, 503)

    async def show_metrics(self) -> Response:
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4")

    async def version(self) -> Response:
        return JsonResponse({"version": __version__})

    async def failed(self, request: Request, error: Exception) -> Response:
        """The answer for an exception of a route."""
        if isinstance(error, ClientDisconnect):
            return Response(status_code=_CLIENT_GONE)
        if isinstance(error, HTTPException):
            error = RequestRefused(
                f"{request.method} {request.url.path}: {error.detail}"[:300],
                fix="docs/serving.md lists the routes",
                status=error.status_code,
            )
        if isinstance(error, RequestRefused):
            self.metrics.refused.labels(str(error.status)).inc()
            return refusal(error)
        self.metrics.refused.labels("500").inc()
        return JsonResponse(error_object("the server has failed; its log has the error", 500), 500)

    async def _answer(
        self,
        request: Request,
        wish: SamplingFields,
        n_prompts: int,
        prepare: Callable[[], _Prepared],
        fields: tuple[str, str],
        *,
        continues: bool,
    ) -> Response:
        """Lets a request in, begins its answers and writes them.

        prepare: encodes the prompts, in a thread, because a long text takes as long as many steps. fields: the names of
        the fields with the prompt and with the number of new tokens.
        """
        owner = request.scope["owner"]
        leave = self.gate.enter(owner, wish.n * n_prompts)
        generation: RequestAnswers | None = None

        def close() -> None:
            leave()
            if generation is not None:
                generation.close()

        try:
            prompts, writer, form, shown = await asyncio.to_thread(prepare)
            params = wish.params(self._n_new(prompts, wish, fields), shown, continues=continues)
            forms = [] if form is None else [form.copy() for _ in range(wish.n * n_prompts)]
            if self.settings.logs_requests:
                texts = [self.model.decode(prompt, special=True) for prompt in prompts]
                logger.info("request %s: %r, prompts %r", writer.head["id"], wish, texts)
            generation = self._begin(prompts, wish, owner, params, forms)
            reply = Reply(generation, writer, wish.n * n_prompts, functools.partial(self._error_object, form))
            if wish.stream:
                return EventStream(reply.pieces(), close, self.settings.stall_s)
            body, status = await until_gone(request.receive, reply.whole())
        except BaseException:
            close()
            raise
        close()
        if status != 200:
            self.metrics.refused.labels(str(status)).inc()
        return JsonResponse(body, status)

    def _begin(
        self,
        prompts: list[list[int]],
        wish: SamplingFields,
        owner: str,
        params: SamplingParams,
        forms: Sequence[Grammar],
    ) -> RequestAnswers:
        salt = wish.cache_salt if self.settings.shares_prefixes or not owner else f"{owner}:{wish.cache_salt}"
        try:
            return RequestAnswers(self.model, self.metrics, prompts, params, n=wish.n, salt=salt, grammars=forms)
        except (ModelError, SchedulingError) as error:
            raise RequestRefused(error.what, param="prompt", fix=error.fix) from error
        except StateError as error:
            raise RequestRefused(error.what, fix="look at /health", status=503) from error

    def _error_object(self, form: TokenGrammar | None, error: Exception) -> tuple[dict[str, Any], int]:
        """The body and the status for an error of the engine. A form that turns out to be too much work, or to leave no
        token beside the other fields, is a mistake of the request."""
        status = 400 if form is not None and isinstance(error, ModelError) else 500 if self.model.is_alive else 503
        return error_object(f"the answer has failed: {type(error).__name__}: {error}", status), status

    async def _body(self, request: Request) -> dict[str, Any]:
        return decode_body(await read_body(request, self.settings.max_body_bytes))

    def _check_model(self, name: str) -> None:
        if name and name not in self.names:
            raise RequestRefused(
                f"{name[:100]!r} is not served here; {', '.join(self.names)} is",
                param="model",
                fix="write that name",
                status=404,
                code="model_not_found",
            )

    def _card(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self.model.created,
            "owned_by": "deepspeed_c",
            "max_model_len": self.model.max_model_len,
            "vocab_size": self.model.n_words,
        }

    def _head(self, prefix: str, wish: SamplingFields) -> dict[str, Any]:
        name = wish.model or self.names[0]
        return {"id": f"{prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": name}

    def _form(self, wish: SamplingFields) -> TokenGrammar | None:
        others = {name: value for name, value in wish.structure.items() if name != "response_format"}
        asked = wish.structure.get("response_format")
        return grammar_of(asked, others, self.model.tokenizer, self.bounds.n_words, self.bounds.ends)

    def _render(self, wish: Chat | Texts, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str:
        return render(
            self.model.tokenizer,
            messages,
            tools,
            add_generation_prompt=wish.add_generation_prompt,
            continue_final_message=wish.continue_final_message,
            template=self.settings.chat_template,
            kwargs=wish.template_kwargs,
        )

    def _n_new(self, prompts: list[list[int]], wish: SamplingFields, fields: tuple[str, str]) -> int:
        """Most new tokens. Raises RequestRefused for prompts that leave no space for them."""
        n_prompt, most, wanted = max(map(len, prompts)), self.model.max_model_len, wish.max_tokens
        if not min(map(len, prompts)):
            raise RequestRefused("has no tokens", param=fields[0], fix="send one token at least")
        if n_prompt >= most or (wanted is not None and n_prompt + wanted > most):
            asked = "" if wanted is None else f", {wanted} more are asked for"
            raise RequestRefused(
                f"the prompt has {n_prompt} tokens{asked}, and {most} are the most of both",
                param=fields[n_prompt < most],
                fix="shorten the prompt, or ask for fewer tokens",
                code="context_length_exceeded",
            )
        if wanted is not None:
            return wanted
        return min(wish.default_tokens or most, most - n_prompt)
