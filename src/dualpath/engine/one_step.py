"""Requests that a PE whose layers take turns cannot go on with.

Between two steps of a request its KV lies in the PE buffer, in slots of its session. A request
without a session (sent to the engine by somebody else than the front) and one that decodes have
none: the second step would attend to whatever another layer left behind. They end with an error.
"""

from __future__ import annotations

import logging
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.request import Request, RequestStatus

from dualpath.engine.scheduler_side import request_params

logger = logging.getLogger(__name__)


def is_stranded(request: Request) -> bool:
    """Whether the request's next step would need KV that is nowhere.

    With async scheduling a request whose last step is still under way has all of its prompt
    computed already; it has a next step only when it wants more than one token.
    """
    if not request.num_computed_tokens:
        return False
    if request.num_computed_tokens < request.num_prompt_tokens:
        return request_params(request) is None
    return bool(request.max_tokens > 1)


class OneStep:
    """Ends what cannot go on. Mixed into vLLM's schedulers, before them.

    ``_layers_take_turns`` is set by the scheduler that uses it.
    """

    # What the mixin uses of vLLM's scheduler.
    running: list[Request]

    _layers_take_turns = False
    _ended: list[Request]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._ended = []

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """vLLM's, without requests that would read KV that is not there."""
        if self._layers_take_turns:
            self._end_stranded()
        return super().schedule(*args, **kwargs)  # type: ignore[misc]

    def update_from_output(self, *args: Any, **kwargs: Any) -> dict[int, EngineCoreOutputs]:
        """vLLM's, with an error for each request that was ended."""
        outputs: dict[int, EngineCoreOutputs] = super().update_from_output(  # type: ignore[misc]
            *args, **kwargs
        )
        for request in self._ended:
            outputs.setdefault(request.client_index, EngineCoreOutputs()).outputs.append(
                EngineCoreOutput(
                    request_id=request.request_id,
                    new_token_ids=[],
                    finish_reason=request.get_finished_reason(),
                )
            )
        self._ended.clear()
        return outputs

    def _end_stranded(self) -> None:
        stranded = [request for request in self.running if is_stranded(request)]
        if not stranded:
            return
        for request in stranded:
            logger.error(
                "request %s ended: layers take turns in this engine's memory, and only the front's "
                "prefills can go on after a step",
                request.request_id,
            )
        self._ended += self.finish_requests(  # type: ignore[attr-defined]
            [request.request_id for request in stranded], RequestStatus.FINISHED_ERROR
        )
