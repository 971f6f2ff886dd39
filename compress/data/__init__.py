"""Text, images and speech for calibration and evaluation, as rows of integers."""

from compress.data.rows import CalibrationData, EvaluationData, TextReader, hashed, load, load_evaluation, load_training
from compress.data.spans import Spans, evaluation_spans
from compress.data.speech import SpeechReader
from compress.data.vision import ImageReader

__all__ = [
    "CalibrationData",
    "EvaluationData",
    "ImageReader",
    "Spans",
    "SpeechReader",
    "TextReader",
    "evaluation_spans",
    "hashed",
    "load",
    "load_evaluation",
    "load_training",
]
