"""Hand-written domains that never occur in training: library loans, greenhouse sensors, parking permits, museum tours.

Their nouns, tools and parameters have names of their own; pools for training leave out their words.
"""

from __future__ import annotations

from scripts.tiny_agent.template import Template, column, locked
from scripts.tiny_agent.toolset import Toolset

_loans = Toolset(
    "loans",
    column("loan_ref", "code", "Reference of the loan", label="loan reference", form="LN-####"),
    (
        column("book_title", "title", "Title of the book"),
        column("borrower", "person", "Who has the book"),
        column("give_back_by", "date", "Last day of the loan, YYYY-MM-DD", label="last day"),
        column("loan_state", "choice", "State of the loan", choices="lent reserved returned"),
    ),
)
LOANS = Template(
    noun="library loan",
    plural="library loans",
    tools=_loans,
    unseen=True,
    operations=(
        _loans.find(
            "query_loans",
            "list",
            "List library loans.",
            ("borrower", "loan_state"),
            show=("loan_ref", "book_title", "borrower"),
        ),
        _loans.get("loan_info", "show", "Show all we know about a library loan."),
        _loans.create(
            "lend_book",
            "lend",
            "Lend a book to a borrower: a new library loan.",
            ("book_title", "borrower", "give_back_by"),
            required=("book_title", "borrower"),
            fixed={"loan_state": "lent"},
        ),
        _loans.update(
            "extend_loan",
            "extend",
            "Extend a library loan: give it another last day.",
            {"extended_until": "give_back_by"},
            required=("extended_until",),
            locked=locked("loan_state", "returned", "loan {key} is {value}"),
            show=("loan_ref", "give_back_by"),
        ),
        _loans.close(
            "return_book",
            "return",
            "Return the book of a library loan.",
            {"loan_state": "returned"},
            show=("loan_ref", "loan_state"),
        ),
    ),
)

_sensors = Toolset(
    "sensors",
    column("probeId", "code", "Id of the sensor", label="probe id", form="GS-###"),
    (
        column("bed", "word", "Plant bed that it watches", label="plant bed"),
        column("soilMoisture", "count", "Soil moisture in per cent", label="soil moisture"),
        column("warmth", "amount", "Soil warmth in degrees", label="soil warmth"),
        column("caretakerName", "person", "Plant keeper who looks after it", label="plant keeper"),
        column("muted", "flag", "Whether it is muted"),
    ),
)
SENSORS = Template(
    noun="greenhouse sensor",
    plural="greenhouse sensors",
    tools=_sensors,
    unseen=True,
    operations=(
        _sensors.find(
            "lookupSensors",
            "find",
            "Find greenhouse sensors.",
            ("bed", "caretakerName", "muted"),
            show=("probeId", "bed", "soilMoisture"),
        ),
        _sensors.get("fetchSensorReading", "read", "Read one greenhouse sensor."),
        _sensors.update(
            "configureSensor",
            "configure",
            "Configure a greenhouse sensor: its plant keeper, or whether it is muted.",
            ("caretakerName", "muted"),
            show=("probeId", "caretakerName", "muted"),
        ),
        _sensors.delete("unregisterSensor", "unregister", "Unregister a greenhouse sensor for good."),
    ),
)

_permits = Toolset(
    "permits",
    column("permit_code", "code", "Code of the permit", label="permit code", form="P@-#####"),
    (
        column("holder", "person", "Who may park"),
        column("plate", "code", "Number plate of the car", label="number plate", form="@@-###-@"),
        column("parking_zone", "choice", "Zone where the permit is good", choices="north south harbour centre"),
        column("valid_through", "date", "Last valid day, YYYY-MM-DD", label="last valid day"),
        column("permit_state", "choice", choices="valid revoked"),
    ),
)
PERMITS = Template(
    noun="parking permit",
    plural="parking permits",
    tools=_permits,
    unseen=True,
    operations=(
        _permits.find(
            "permits_lookup",
            "look up",
            "Look up parking permits.",
            ("holder", "parking_zone"),
            show=("permit_code", "holder", "parking_zone"),
        ),
        _permits.get("permits_check", "check", "Check one parking permit."),
        _permits.create(
            "permits_grant",
            "grant",
            "Grant a parking permit.",
            ("holder", "plate", "parking_zone", "valid_through"),
            required=("holder", "plate", "parking_zone"),
            fixed={"permit_state": "valid"},
        ),
        _permits.update(
            "permits_swap_plate",
            "change",
            "Change the number plate of a parking permit.",
            {"plate_of_new_car": "plate"},
            required=("plate_of_new_car",),
            locked=locked("permit_state", "revoked", "permit {key} is {value}"),
            show=("permit_code", "plate"),
        ),
        _permits.close(
            "permits_revoke",
            "revoke",
            "Revoke a parking permit for good.",
            {"permit_state": "revoked"},
            show=("permit_code", "permit_state"),
        ),
    ),
)

_tours = Toolset(
    "tours",
    column("tour_code", "code", "Code of the tour", label="tour code", form="MT##"),
    (
        column("theme_of_tour", "title", "Tour theme: what is shown", label="tour theme"),
        column("docent", "person", "Docent who leads the tour"),
        column("tour_day", "date", "Day of the tour, YYYY-MM-DD", label="tour day"),
        column("gathering_at", "time", "Gathering time of the group, HH:MM", label="gathering time"),
        column("group_size", "count", "Group size, in people", label="group size"),
        column("spoken_languages", "tags", "Spoken languages of the tour", label="spoken languages"),
    ),
)
TOURS = Template(
    noun="museum tour",
    plural="museum tours",
    tools=_tours,
    unseen=True,
    operations=(
        _tours.find(
            "browse_tours",
            "browse",
            "Browse museum tours.",
            ("docent", "tour_day"),
            contains={"spoken_language": "spoken_languages"},
            show=("tour_code", "theme_of_tour", "tour_day"),
        ),
        _tours.get("tour_sheet", "show", "Show the sheet of one museum tour."),
        _tours.create(
            "plan_tour",
            "plan",
            "Plan a museum tour.",
            ("theme_of_tour", "docent", "tour_day", "gathering_at", "group_size", "spoken_languages"),
            required=("theme_of_tour", "tour_day", "gathering_at"),
        ),
        _tours.update(
            "shift_tour",
            "shift",
            "Shift a museum tour to another tour day or gathering time.",
            ("tour_day", "gathering_at"),
            show=("tour_code", "tour_day", "gathering_at"),
        ),
        _tours.delete("scrap_tour", "scrap", "Scrap a museum tour."),
    ),
)

TEMPLATES = (LOANS, SENSORS, PERMITS, TOURS)
