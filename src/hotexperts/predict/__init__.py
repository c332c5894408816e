"""Which experts will a layer ask for next? One file a predictor, one contract (`base`)."""

from hotexperts.predict.base import Hints, Predictor
from hotexperts.predict.control import Control
from hotexperts.registry import Registry

PREDICTORS: Registry[Predictor] = Registry(
    "predictor",
    Predictor,  # type: ignore[type-abstract]  # the base is only compared with
    {
        "combined": "hotexperts.predict.combined:Combined",
        "cross-lift": "hotexperts.predict.cross_lift:CrossLift",
        "cross-markov": "hotexperts.predict.cross_markov:CrossMarkov",
        "ewma": "hotexperts.predict.ewma:Ewma",
        "gate": "hotexperts.predict.gate:Gate",
        "logistic": "hotexperts.predict.logistic:Logistic",
        "oracle": "hotexperts.predict.oracle:Oracle",
        "popularity": "hotexperts.predict.popularity:Popularity",
        "previous": "hotexperts.predict.previous:Previous",
        "stride": "hotexperts.predict.stride:Stride",
        "temporal-lift": "hotexperts.predict.temporal_lift:TemporalLift",
        "temporal-markov": "hotexperts.predict.temporal_markov:TemporalMarkov",
    },
)

__all__ = ["PREDICTORS", "Control", "Hints", "Predictor"]
