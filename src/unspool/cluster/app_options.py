"""The options of a cluster's application, as its configuration file has them: checked before anything starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Self

from unspool.cluster.models import ModelSource
from unspool.cluster.pool import Patience
from unspool.errors import RequestError
from unspool.options import check_names, engine_config

if TYPE_CHECKING:
    from unspool.server.config import ServerConfig

COUNTS = ("num_replicas", "num_ingresses", "min_replicas", "max_replicas", "max_attempts")
SECONDS = ("silence", "patience", "drain", "report_period", "health_check_period", "upscale_delay", "downscale_delay")


@dataclass(frozen=True, kw_only=True)
class AppOptions:
    """What an application serves and with how many replicas."""

    model: str = "smollm2"
    random: str | None = None  # a shape of random weights, in place of a model
    engine: Mapping[str, Any] = field(default_factory=dict)  # the engine's options: EngineConfig's fields
    server: Mapping[str, Any] = field(default_factory=dict)  # the server's options: ServerConfig's fields
    num_replicas: int = 1
    num_ingresses: int = 1
    min_replicas: int = 1  # with autoscaling
    max_replicas: int | None = None  # turns autoscaling on
    target_requests: float = 16.0  # of each replica, running and waiting: what autoscaling aims at
    cpus: float | None = None  # of each replica, as Ray counts; None: the engine's threads, or 1
    gpus: float = 0.0
    silence: float = 10.0  # seconds without a sign of life after which a replica is lost
    patience: float = 60.0  # seconds that a request waits for a replica that can take it
    max_attempts: int = 5  # at one request, on replicas that are lost one after the other
    drain: float = 30.0  # seconds that a replica that is to go has for its answers
    surge: int = 0  # replicas that an update may start before it ends others, in percent of their number
    runtime_env: Mapping[str, Any] = field(default_factory=dict)  # Ray's: another version of the code, say
    report_period: float = 1.0  # seconds between two reports of a replica to the routers
    health_check_period: float = 2.0
    upscale_delay: float = 5.0
    downscale_delay: float = 120.0
    log_socket: str | None = None  # of the command that started a local Ray, and shows what is logged
    route_by_prefix: bool = True
    route_slack: int = 4  # see routing
    route_imbalance: float = 1.5
    route_min_match: float = 0.1

    def __post_init__(self) -> None:
        for name in COUNTS:
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise RequestError(f"{name} is {value!r}; allowed: a whole number from 1", name)
        for name in (*SECONDS, "target_requests"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e6:
                raise RequestError(f"{name} is {value!r}; allowed: a number above 0", name)
        if self.max_replicas is not None and self.max_replicas < self.min_replicas:
            raise RequestError(
                f"max_replicas is {self.max_replicas}; min_replicas is {self.min_replicas}, and cannot be more",
                "max_replicas",
            )
        if self.max_replicas is not None and self.num_replicas != 1:
            raise RequestError("num_replicas and max_replicas are both given; autoscaling chooses", "num_replicas")
        engine_config(dict(self.engine))  # type: ignore[arg-type]
        self.server_config()

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Options from a configuration file; an unknown name is refused, with the nearest one that exists."""
        check_names(values, [each.name for each in fields(cls)], "option")
        return cls(**values)

    @property
    def is_autoscaled(self) -> bool:
        return self.max_replicas is not None

    @property
    def source(self) -> ModelSource:
        return ModelSource(self.model, self.random, dict(self.engine))

    def server_config(self) -> ServerConfig:
        from unspool.server.config import ServerConfig

        check_names(self.server, [each.name for each in fields(ServerConfig)], "server option")
        lists = {name: tuple(value) for name, value in self.server.items() if isinstance(value, list)}
        return ServerConfig(**{**self.server, **lists})

    def resources(self) -> dict[str, float]:
        """What Ray sets aside for a replica."""
        cpus = self.cpus if self.cpus is not None else float(self.engine.get("threads") or 1)
        return {"num_cpus": cpus, **({"num_gpus": self.gpus} if self.gpus else {})}

    @property
    def endurance(self) -> Patience:
        return Patience(self.max_attempts, self.patience)

    def rule(self) -> dict[str, Any]:
        return {
            "slack": self.route_slack,
            "imbalance": self.route_imbalance,
            "min_match": self.route_min_match,
            "by_prefix": self.route_by_prefix,
        }
