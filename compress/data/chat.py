"""Conversations of a data set, rendered by the model's chat template."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from compress.recipe.models import TextSet
from runtime.config.messages import listing, show
from runtime.errors import RequestError, first_line

COLUMNS = ("messages", "conversations")
"""Keys of conversations in rows without text."""

_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
}  # as ShareGPT has them, under `from`


class Conversation(str):
    """A conversation rendered by a chat template, with all special tokens."""


def render(
    source: TextSet, messages: Any, tools: Any, where: str, tokenizer: Any, image: Callable[[Any], Any] | None = None
) -> Conversation:
    """The text of a conversation.

    Args:
        messages: [{"role", "content", ...}], or [{"from", "value"}]; a content is text, or a list of text parts.
        tools: tool descriptions as chat templates take them, or their JSON; None: no tools.
        where: the row, for messages.
        tokenizer: a tokenizer or processor with the chat template.
        image: maps an image part to what the template gets; None: image parts are refused.

    Raises:
        RequestError: not a conversation, no chat template, or the template rejects it.
    """

    def refused(reason: str) -> RequestError:
        return RequestError(source.at("data", f"{where} {reason}"))

    try:
        turns = [_turn(message, image) for message in messages]
        if isinstance(tools, str):
            tools = json.loads(tools)
    except (ValueError, RecursionError) as error:
        raise refused(f"is not a conversation: {first_line(error)}") from None
    if not turns:
        raise refused("is not a conversation: the list of messages is empty")
    if not getattr(tokenizer, "chat_template", None):
        raise refused(
            "is a conversation, and the model's tokenizer has no chat template to write it with; calibrate on text, or add the "
            "chat_template.jinja of the model's family"
        )
    try:
        text = tokenizer.apply_chat_template(turns, tools=tools or None, tokenize=False)
    except Exception as error:  # templates are programs of others, and raise what they like
        roles = listing(dict.fromkeys(turn["role"] for turn in turns))
        raise refused(f"is refused by the model's chat template: {first_line(error)} (roles: {roles})") from None
    for turn in turns:
        known = turn["role"] in ("system", "developer", "user", "assistant", "tool")
        if not known and isinstance(turn["content"], str) and turn["content"].strip() not in text:
            raise refused(f"has the role {show(turn['role'])}, which the model's chat template drops")
    return Conversation(text)


def _turn(message: Any, image: Callable[[Any], Any] | None) -> dict[str, Any]:
    """A message as templates take it; ValueError if it is not one."""
    if not isinstance(message, Mapping):
        raise ValueError(f"expected messages with a role and a content, got {show(message)}")
    told = {key: value for key, value in message.items() if value is not None}  # Parquet has every key in every message
    if "role" not in told and "from" in told:
        role = told.pop("from")
        told = {
            "role": _ROLES.get(role, role) if isinstance(role, str) else role,
            "content": told.pop("value", None),
            **told,
        }
    if not isinstance(told.get("role"), str):
        raise ValueError(f"a message has no role; its keys: {listing(map(str, message)) or 'none'}")
    calls = told.get("tool_calls")
    content = told.get("content", "" if calls else None)
    if image is not None and isinstance(content, (str, list)):
        # Templates of models that see know texts as parts beside images.
        parts = [content] if isinstance(content, str) else content
        pictures = [isinstance(part, Mapping) and part.get("type") == "image" for part in parts]
        content = [
            image(part) if is_picture else {"type": "text", "text": _part(part)}
            for part, is_picture in zip(parts, pictures, strict=True)
        ]
    elif isinstance(content, list):
        content = "".join(map(_part, content))
    if not isinstance(content, (str, list)):
        raise ValueError(f"the content of a message of role {show(told['role'])} must be text, got {show(content)}")
    if isinstance(calls, list):
        told["tool_calls"] = [_call(call) for call in calls]
    return {**told, "content": content}


def _part(part: Any) -> str:
    text = part.get("text") if isinstance(part, Mapping) and part.get("type", "text") == "text" else part
    if not isinstance(text, str):
        kind = part.get("type") if isinstance(part, Mapping) else part
        raise ValueError(f"a part of a message must be text, got {show(kind)}")
    return text


def _call(call: Any) -> Any:
    """A tool call with its arguments as a mapping, as templates expect; APIs give JSON text."""
    function = call.get("function") if isinstance(call, Mapping) else None
    arguments = function.get("arguments") if isinstance(function, Mapping) else None
    if not isinstance(arguments, str) or not isinstance(function, Mapping):
        return call
    return {**call, "function": {**function, "arguments": json.loads(arguments or "{}")}}
