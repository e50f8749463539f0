"""What status shows of annotated pods, with defaults for tests."""

from deviceplugin.annotated.status import AnnotatedStatus


def annotated_status(**changes: object) -> AnnotatedStatus:
    fields: dict[str, object] = {
        "runtime": "containerd 2.1.9",
        "error": "",
        "since_unix_s": 0.0,
        "registrations": 1,
        "answer_s": 1.2,
        "late": 0,
        "slowest_s": {},
        "trust": "any",
        "readiness": "True",
        "readiness_message": "",
        "granted": 3,
        "refused": 4,
        "unguarded": "",
    }
    return AnnotatedStatus(**(fields | changes))  # type: ignore[arg-type]
