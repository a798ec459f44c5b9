"""A personal assistant: calendar, mail, weather, trains and a calculator, with a user who answers between the steps."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from workloads.script import Script, tool

TOOLSET = "office"

TOOLS = [
    tool(
        "list_events",
        "Events of a calendar between two days, in order of time.",
        ["calendar", "first_day", "last_day"],
        calendar={"type": "string", "enum": ["own", "team", "rooms"], "description": "Whose events"},
        first_day="YYYY-MM-DD",
        last_day="YYYY-MM-DD",
    ),
    tool(
        "create_event",
        "Create an event and invite people. Returns the event with its number.",
        ["title", "start", "minutes"],
        title="Short title",
        start="YYYY-MM-DD HH:MM, local time",
        minutes={"type": "integer", "minimum": 5},
        people={"type": "array", "items": {"type": "string"}, "description": "Names from the address book"},
        place="Room or address",
    ),
    tool(
        "move_event",
        "Move an event to another start; its length stays.",
        ["event", "start"],
        event={"type": "integer"},
        start="YYYY-MM-DD HH:MM",
    ),
    tool(
        "search_mail",
        "Newest mails that contain all the words, at most ten.",
        ["words"],
        words="Words, separated by blanks",
        sender="Only from this person",
    ),
    tool(
        "write_mail",
        "Send a plain text mail.",
        ["to", "subject", "text"],
        to="A name from the address book",
        subject="Subject",
        text="Body",
    ),
    tool(
        "weather",
        "Forecast for a place, by day.",
        ["place"],
        place="City",
        days={"type": "integer", "minimum": 1, "maximum": 7},
    ),
    tool(
        "trains",
        "Connections between two cities after a time.",
        ["from_city", "to_city", "after"],
        from_city="City",
        to_city="City",
        after="YYYY-MM-DD HH:MM",
    ),
    tool(
        "calculate",
        "Evaluate an arithmetic expression with + - * / ( ) and percent.",
        ["expression"],
        expression="Such as (12.5 + 3) * 4",
    ),
]

_SYSTEM = """You are the assistant of a busy person in a small engineering office. You see the calendar, mail and \
address book, and you act for that \
person through the tools. Today is Monday, 2031-05-05; the working day is from 08:30 to 17:30 with a break at noon.

Before you create, move or send anything, be sure that you know the day, the time and the people. If one of them is \
missing, ask a single short \
question. If the person has said it in plain words already, don't ask again: act, then say what you did. Never invent \
a name, a price or a time; \
look it up. Read-only tools need no permission and may be called together.

Meetings last 30 minutes unless somebody says otherwise. Leave 15 minutes between two meetings in different places. \
Meetings with people outside the \
office take place in the room Lisbon if it is free, else in Oslo. Keep Friday afternoons free.
Travel by rail where it takes less than six hours, second class, and book nothing that can't be changed.
Birthdays and private appointments are not for others: say "busy" when somebody asks.

Answer in one to three sentences. Times are given as 14:30, days as Tuesday, 6 May. No lists unless there are more \
than three things to choose from, \
no apologies, no summary of what the person has just said. When a tool fails, say which one, and what you will try \
instead.
Costs are in euro with two decimals.
"""

_PEOPLE = (
    "Mira Okafor",
    "Jonas Lindqvist",
    "Ayse Demir",
    "Tomas Havel",
    "Ingrid Sole",
    "Rafael Pinto",
    "Noor Haddad",
    "Elsa Brandt",
)
_CITIES = ("Porto", "Graz", "Tallinn", "Leuven", "Cork", "Malmo")
_TITLES = (
    "Design review",
    "Budget round",
    "Interview",
    "Supplier call",
    "Sprint planning",
    "Site visit",
    "Safety training",
    "One to one",
    "Retrospective",
)
_DAYS = ("05", "06", "07", "08", "09")


def scripts(rng: random.Random) -> Iterator[Script]:
    scenarios = (_meeting, _trip, _budget)
    for number in range(7):
        yield scenarios[number % len(scenarios)](number, rng)


def _begin(number: int, group: str, rng: random.Random) -> Script:
    return Script(f"office-{number}", group=group, toolset=TOOLSET, system=_SYSTEM, rng=rng)


def _events(rng: random.Random, days: tuple[str, ...], per_day: int) -> list[dict[str, Any]]:
    events = []
    for day in days:
        for hour in sorted(rng.sample(range(8, 17), per_day)):
            events.append(
                {
                    "event": rng.randrange(1000, 9999),
                    "title": rng.choice(_TITLES),
                    "start": f"2031-05-{day} {hour:02}:30",
                    "minutes": rng.choice((30, 30, 45, 60)),
                    "people": rng.sample(_PEOPLE, rng.randrange(1, 4)),
                    "place": rng.choice(("Lisbon", "Oslo", "online", "front desk")),
                }
            )
    return events


def _meeting(number: int, rng: random.Random) -> Script:
    script = _begin(number, "move a meeting", rng)
    person, day = rng.choice(_PEOPLE), rng.choice(_DAYS[1:4])
    events = _events(rng, _DAYS, 4)
    clash = rng.choice(events)
    script.user(
        f"{person} can't come to the {clash['title'].lower()} on 2031-05-{clash['start'][8:10]}. Find another time "
        f"this week and move it."
    )
    window = {"first_day": "2031-05-05", "last_day": "2031-05-09"}
    script.call(None, ("list_events", {"calendar": "own"} | window), ("list_events", {"calendar": "rooms"} | window))
    script.results(events, _events(rng, _DAYS, 3))
    script.say(
        f"You are both free on 2031-05-{day} at 11:00 and at 15:30, and {clash['place']} is open. Which one shall I "
        f"take?"
    )
    script.user("The later one.")
    script.call(None, ("move_event", {"event": clash["event"], "start": f"2031-05-{day} 15:30"}))
    script.results(
        {"event": clash["event"], "moved_to": f"2031-05-{day} 15:30", "invitations_sent": len(clash["people"])}
    )
    if rng.random() < 0.6:
        script.call(
            None,
            (
                "write_mail",
                {
                    "to": person,
                    "subject": clash["title"],
                    "text": f"We moved it to 15:30 on 2031-05-{day}. Same place. See you then.",
                },
            ),
        )
        script.results({"sent": True})
    script.say(
        f"Moved to 15:30 on 2031-05-{day}; everybody has a new invitation, and {person.split()[0]} has been told."
    )
    script.user("And is there anything left on that day that I should prepare?")
    script.say(f"Only the {rng.choice(_TITLES).lower()} at 09:30. The others have no papers attached.")
    return script


def _trip(number: int, rng: random.Random) -> Script:
    script = _begin(number, "plan a trip", rng)
    start, goal = rng.sample(_CITIES, 2)
    person, day = rng.choice(_PEOPLE), rng.choice(_DAYS[1:])
    script.user(
        f"I need to be in {goal} on 2031-05-{day} by noon to meet {person}, from {start}. What is the weather like "
        f"there, and when do I leave?"
    )
    script.call(
        None,
        ("weather", {"place": goal, "days": 5}),
        ("trains", {"from_city": start, "to_city": goal, "after": f"2031-05-{day} 05:00"}),
    )
    script.results(_forecast(goal, rng), _connections(start, goal, day, rng))
    script.say(
        f"The 06:12 reaches {goal} at 10:48 with one change; the 07:40 would be too late. Take a coat, it looks "
        f"wet. Shall I put it in your calendar?"
    )
    script.user("Yes, with an hour for the meeting at 11:30.")
    script.call(
        None,
        ("create_event", {"title": f"Train to {goal}", "start": f"2031-05-{day} 06:12", "minutes": 276}),
        (
            "create_event",
            {"title": f"Meet {person}", "start": f"2031-05-{day} 11:30", "minutes": 60, "people": [person]},
        ),
    )
    script.results(
        {"event": rng.randrange(1000, 9999), "conflicts": []},
        {"event": rng.randrange(1000, 9999), "conflicts": [], "invited": [person]},
    )
    if rng.random() < 0.5:
        script.call("One more check for that day.", ("search_mail", {"words": f"{goal} ticket"}))
        script.results(_mails(goal, rng))
    script.say(f"Both are in your calendar and {person.split()[0]} is invited. Nothing else had to move.")
    return script


def _budget(number: int, rng: random.Random) -> Script:
    script = _begin(number, "check a budget", rng)
    prices = [rng.randrange(80, 900) + rng.choice((0, 0.5, 0.95)) for _ in range(4)]
    people = rng.randrange(6, 24)
    script.user(
        f"We send {people} people to the spring training. Look up what the offers in my mail say, and tell me the "
        f"total with 19 % tax."
    )
    script.call(None, ("search_mail", {"words": "spring training offer"}))
    script.results(_offers(prices, rng))
    expression = f"({prices[0]} + {prices[1]}) * {people} * 1.19"
    script.call("Course and hotel are per person.", ("calculate", {"expression": expression}))
    total = (prices[0] + prices[1]) * people * 1.19
    script.results({"value": round(total, 2)})
    script.say(f"Course and hotel for {people} people come to {total:.2f} euro with tax. Travel is not in the offers.")
    travel, limit = rng.choice((45, 60, 85)), rng.choice((20000, 30000))
    whole = total + people * travel
    script.user(f"Add {travel} euro of travel for each, and see if we stay below {limit}.")
    script.call(None, ("calculate", {"expression": f"{total:.2f} + {people} * {travel}"}))
    script.results({"value": round(whole, 2)})
    script.say(f"With travel it is {whole:.2f} euro, {'below' if whole < limit else 'above'} your {limit}.")
    if rng.random() < 0.7:
        person = rng.choice(_PEOPLE)
        script.user(f"Tell {person} that, please.")
        text = f"Spring training for {people} people: {whole:.2f} euro with tax and travel."
        script.call(None, ("write_mail", {"to": person, "subject": "Spring training", "text": text}))
        script.results({"sent": True})
        script.say(f"{person.split()[0]} has the figure.")
    return script


def _forecast(place: str, rng: random.Random) -> list[dict[str, Any]]:
    skies = ("clear", "cloudy", "showers", "rain", "fog in the morning, then sun")
    return [
        {
            "place": place,
            "day": f"2031-05-{day}",
            "sky": rng.choice(skies),
            "low": rng.randrange(2, 9),
            "high": rng.randrange(10, 22),
            "rain_mm": rng.randrange(9),
        }
        for day in _DAYS
    ]


def _connections(start: str, goal: str, day: str, rng: random.Random) -> list[dict[str, Any]]:
    connections = []
    for leave, arrive in (
        ("06:12", "10:48"),
        ("07:40", "12:21"),
        ("09:05", "13:52"),
        ("10:30", "15:04"),
        ("12:10", "16:45"),
    ):
        change = rng.choice(("Central", "Junction", "North"))
        connections.append(
            {
                "from": start,
                "to": goal,
                "day": f"2031-05-{day}",
                "leave": leave,
                "arrive": arrive,
                "changes": [{"at": change, "minutes": rng.randrange(8, 40), "platform": rng.randrange(1, 14)}],
                "price": round(rng.uniform(29, 119), 2),
                "seats_left": rng.randrange(1, 90),
            }
        )
    return connections


def _mails(word: str, rng: random.Random) -> list[dict[str, Any]]:
    openings = ("Dear all", "Hello", "Good morning", "Hi there")
    return [
        {
            "from": rng.choice(_PEOPLE),
            "date": f"2031-04-{rng.randrange(10, 30)}",
            "subject": f"{word}: {rng.choice(('tickets', 'question', 'reminder', 'notes'))}",
            "text": f"{rng.choice(openings)}, the papers for {word} are in the usual folder. "
            f"Please bring the printed form, gate {rng.randrange(2, 30)} closes {rng.randrange(5, 25)} minutes "
            f"before departure.",
        }
        for _ in range(rng.randrange(1, 5))
    ]


def _offers(prices: list[float], rng: random.Random) -> list[dict[str, Any]]:
    things = ("course with material", "hotel, two nights with breakfast", "room hire a day", "evening programme")
    return [
        {
            "from": rng.choice(_PEOPLE),
            "date": f"2031-04-{rng.randrange(10, 30)}",
            "subject": f"Offer: {thing}",
            "text": f"As discussed we can offer the {thing} at {price:.2f} euro net. The price holds for four weeks. "
            "Cancellation is free up to ten days before.",
        }
        for thing, price in zip(things, prices, strict=True)
    ]
