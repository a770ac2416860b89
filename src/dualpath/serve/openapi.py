"""The OpenAPI document of the front, served at ``/openapi.json``.

Bodies list what the front itself looks at and the commonly used rest; further fields of vLLM's API
are passed on to the engines, which check them.
"""

from __future__ import annotations

from typing import Any, Final

from dualpath import __version__
from dualpath.config import Mode
from dualpath.serve.body import MAX_CHOICES, MAX_TOKEN_ID, Endpoint

Json = dict[str, Any]

_BOOL: Final[Json] = {"type": "boolean"}
_TEXT: Final[Json] = {"type": "string"}
_NUMBER: Final[Json] = {"type": "number"}
_COUNT: Final[Json] = {"type": "integer", "minimum": 0}
_OBJECT: Final[Json] = {"type": "object"}


def document(model: str) -> Json:
    """The document for a front that serves ``model``."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "DualPath",
            "version": __version__,
            "description": "OpenAI-compatible API of a cluster whose KV-cache lives on storage.",
        },
        "paths": {
            Endpoint.CHAT.value: {"post": _generation("ChatRequest", "Answer a conversation")},
            Endpoint.COMPLETION.value: {"post": _generation("CompletionRequest", "Go on a text")},
            "/v1/models": {"get": _simple("The model served", key=True)},
            "/v1/models/{name}": {
                "get": {
                    **_simple("One model", 404, key=True),
                    "parameters": [
                        {"name": "name", "in": "path", "required": True, "schema": _TEXT}
                    ],
                }
            },
            "/health": {"get": _simple("The front's own parts are alive", 503, plain=True)},
            "/ready": {"get": _simple("A PE and a DE can be used", 503, plain=True)},
            "/metrics": {"get": _simple("Prometheus metrics", plain=True)},
            "/openapi.json": {"get": _simple("This document")},
            "/debug/state": {"get": _simple("All that is held anywhere", 403, admin=True)},
            "/debug/requests": {"get": _simple("The last requests", 403, admin=True)},
            "/debug/attention": {"get": _simple("Attention samples", 403, admin=True)},
            "/admin/weights/advance": {
                "post": {
                    **_simple("Make all stored KV unreachable", 400, 403, 503, admin=True),
                    **_body({"type": "object", "properties": {"in_place": _BOOL}}, required=False),
                }
            },
            "/admin/mode": {
                "post": {
                    **_simple("Serve in another mode", 400, 403, 409, admin=True),
                    **_body(
                        {
                            "type": "object",
                            "required": ["mode"],
                            "properties": {
                                "mode": {"enum": [mode.value for mode in Mode]},
                                "policy": _TEXT,
                            },
                        }
                    ),
                }
            },
        },
        "components": {
            "schemas": _schemas(model),
            "securitySchemes": {
                "api_key": {"type": "http", "scheme": "bearer"},
                "admin_key": {"type": "http", "scheme": "bearer"},
            },
        },
    }


def _generation(schema: str, summary: str) -> Json:
    answers = {
        "200": {
            "description": "The answer; with stream = true as server-sent events",
            "content": {"application/json": {"schema": _OBJECT}, "text/event-stream": {}},
        }
    }
    for status, text in {
        400: "The body is malformed or cannot be served",
        401: "No API key, or an unknown one",
        404: "Another model",
        413: "The body is too large",
        422: "Refused by the engine",
        500: "A fault in the front",
        503: "No engine is free, or the engines failed",
        504: "Not finished within the time limit",
    }.items():
        answers[str(status)] = _error(text)
    return {
        "summary": summary,
        "security": [{"api_key": []}, {}],
        "responses": answers,
        **_body({"$ref": f"#/components/schemas/{schema}"}),
    }


def _simple(
    summary: str, *statuses: int, key: bool = False, admin: bool = False, plain: bool = False
) -> Json:
    answers: Json = {"200": {"description": "As asked"}}
    if not plain:
        answers["200"]["content"] = {"application/json": {"schema": _OBJECT}}
    for status in statuses:
        answers[str(status)] = {"description": "Not now"} if plain else _error("See the message")
    operation: Json = {"summary": summary, "responses": answers}
    if key or admin:
        operation["security"] = [{"admin_key" if admin else "api_key": []}, {}]
        answers["401"] = _error("No key, or a wrong one")
    return operation


def _body(schema: Json, *, required: bool = True) -> Json:
    content = {"application/json": {"schema": schema}}
    return {"requestBody": {"required": required, "content": content}}


def _error(text: str) -> Json:
    schema = {"$ref": "#/components/schemas/Error"}
    return {"description": text, "content": {"application/json": {"schema": schema}}}


def _schemas(model: str) -> Json:
    shared: Json = {
        "model": {"type": "string", "const": model},
        "stream": _BOOL,
        "stream_options": {
            "type": "object",
            "properties": {"include_usage": _BOOL, "continuous_usage_stats": _BOOL},
        },
        "max_tokens": _COUNT,
        "min_tokens": _COUNT,
        "n": {"type": "integer", "minimum": 1, "maximum": MAX_CHOICES},
        "temperature": {"type": "number", "minimum": 0},
        "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        "top_k": {"type": "integer", "minimum": -1},
        "min_p": {"type": "number", "minimum": 0, "maximum": 1},
        "seed": {"type": "integer"},
        "stop": {"anyOf": [_TEXT, {"type": "array", "items": _TEXT}]},
        "stop_token_ids": {"type": "array", "items": _COUNT},
        "ignore_eos": _BOOL,
        "frequency_penalty": {"type": "number", "minimum": -2, "maximum": 2},
        "presence_penalty": {"type": "number", "minimum": -2, "maximum": 2},
        "repetition_penalty": {"type": "number", "exclusiveMinimum": 0},
        "logit_bias": {"type": "object", "additionalProperties": _NUMBER},
        "response_format": {
            "type": "object",
            "required": ["type"],
            "properties": {
                "type": {"enum": ["text", "json_object", "json_schema"]},
                "json_schema": _OBJECT,
            },
        },
        "structured_outputs": _OBJECT,
        "return_token_ids": _BOOL,
        "prompt_logprobs": _COUNT,
        "cache_salt": {"type": "string", "minLength": 1},
        "user": _TEXT,
    }
    part = {
        "type": "object",
        "required": ["type", "text"],
        "properties": {"type": {"const": "text"}, "text": _TEXT},
    }
    message = {
        "type": "object",
        "required": ["role"],
        "properties": {
            "role": {"type": "string", "examples": ["system", "user", "assistant", "tool"]},
            "content": {"anyOf": [_TEXT, {"type": "array", "items": part}]},
            "name": _TEXT,
            "tool_calls": {"type": "array", "items": _OBJECT},
            "tool_call_id": _TEXT,
        },
    }
    token = {"type": "integer", "minimum": 0, "maximum": MAX_TOKEN_ID}
    return {
        "ChatRequest": {
            "type": "object",
            "required": ["messages"],
            "properties": {
                "messages": {"type": "array", "minItems": 1, "items": message},
                **shared,
                "max_completion_tokens": _COUNT,
                "logprobs": _BOOL,
                "top_logprobs": _COUNT,
                "tools": {"type": "array", "items": _OBJECT},
                "tool_choice": {"anyOf": [{"enum": ["none", "auto", "required"]}, _OBJECT]},
                "chat_template_kwargs": _OBJECT,
                "add_generation_prompt": _BOOL,
                "continue_final_message": _BOOL,
                "reasoning_effort": _TEXT,
            },
        },
        "CompletionRequest": {
            "type": "object",
            "required": ["prompt"],
            "properties": {
                "prompt": {
                    "anyOf": [_TEXT, {"type": "array", "minItems": 1, "items": token}],
                },
                **shared,
                "logprobs": _COUNT,
                "echo": _BOOL,
                "suffix": _TEXT,
            },
        },
        "Error": {
            "type": "object",
            "required": ["error"],
            "properties": {
                "error": {
                    "type": "object",
                    "required": ["message", "type", "param", "code"],
                    "properties": {
                        "message": _TEXT,
                        "type": _TEXT,
                        "param": {"type": ["string", "null"]},
                        "code": {"type": ["integer", "string", "null"]},
                    },
                }
            },
        },
    }
