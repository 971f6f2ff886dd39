"""Text and speech for calibration and evaluation, as rows of integers."""

from compress.data.rows import CalibrationData, EvaluationData, hashed, load, load_evaluation, load_training
from compress.data.spans import Spans, evaluation_spans
from compress.data.speech import SpeechReader, load_speech, load_speech_evaluation

__all__ = [
    "CalibrationData",
    "EvaluationData",
    "Spans",
    "SpeechReader",
    "evaluation_spans",
    "hashed",
    "load",
    "load_evaluation",
    "load_speech",
    "load_speech_evaluation",
    "load_training",
]
