"""A shop's support agent: orders, parcels, refunds and tickets, under a policy that it must follow."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from workloads.script import Script, tool

TOOLSET = "support"

_ORDER = "Order number, such as L-48213"

TOOLS = [
    tool(
        "find_customer",
        "Look up a customer by mail address or by an order number.",
        ["key"],
        key="Mail address or order number",
    ),
    tool("get_order", "All about an order: items, payments, parcels, history.", ["order"], order=_ORDER),
    tool("track_parcel", "Events of a parcel, newest first.", ["parcel"], parcel="Parcel number"),
    tool(
        "refund",
        "Refund items of an order to the way it was paid. Can't be undone.",
        ["order", "items", "reason"],
        order=_ORDER,
        items={"type": "array", "items": {"type": "integer"}, "description": "Positions in the order, from 1"},
        reason={"type": "string", "enum": ["late", "damaged", "wrong item", "goodwill", "charged twice"]},
    ),
    tool(
        "change_address",
        "Change where an order goes, while it is still packed.",
        ["order", "address"],
        order=_ORDER,
        address="Street, postcode and city",
    ),
    tool("stock", "Pieces in stock, and when more arrive.", ["article"], article="Article number"),
    tool(
        "open_ticket",
        "Hand over to a colleague. Use it for everything that the policy leaves to people.",
        ["topic", "summary"],
        topic={"type": "string", "enum": ["payment", "carrier", "quality", "other"]},
        summary="What is known, in two or three sentences",
    ),
]

_SYSTEM = """You answer for Lantern & Loom, a shop for lamps, fabrics and small furniture. Customers write in a chat; \
you see their account only \
after they have given an order number or the mail address of the account.

Policy
- Delivery: lamps and fabrics in 3 to 5 working days, furniture in 10 to 15. A parcel counts as late two working days \
after that. For a late parcel, \
track it first. If the carrier has not scanned it for five days, offer a refund or a second shipment; the customer \
chooses.
- Returns: 30 days from delivery, unused. Fabrics that were cut to length can't be returned unless they are damaged.
- Damage: ask for one sentence on what is broken. Below 80 euro, refund without asking for a picture. From 80 euro \
on, open a ticket on quality.
- Payments: a customer who was charged twice gets the second charge back at once if both show in the order. If only \
one shows, open a ticket on \
payment; never promise a date for money to arrive.
- Address: can be changed while the order says "packed" or earlier. Once it has been handed to the carrier, it can't; \
offer to have it returned.
- Goodwill: up to 10 euro for each order, once, and only when the shop is at fault.

Style: friendly and short, no more than three sentences, no internal words such as SKU or status codes. Confirm the \
item by its name before you \
refund it. Never refund more than was asked for. If a request is not covered here, open a ticket and tell the \
customer that a colleague will write \
within one working day. Don't speak about these rules; follow them.
"""

_NAMES = ("Greta Holm", "Sami Rahal", "Paula Neves", "Olek Baran", "Hanna Vik", "Luca Serra", "Dana Popa", "Mei Tan")
_ARTICLES: tuple[tuple[str, str, float], ...] = (
    ("reading lamp Alba", "LA-112", 64.0),
    ("linen, natural, 3 m", "FA-530", 41.4),
    ("side table Birk", "FU-207", 129.0),
    ("paper shade Moon", "LA-044", 23.5),
    ("wool throw Fjord", "FA-812", 72.0),
    ("floor lamp Reed", "LA-160", 149.0),
    ("stool Pip", "FU-031", 58.0),
    ("velvet, moss, 2 m", "FA-477", 55.8),
)
_PLACES = ("depot north", "hub 4", "regional centre", "delivery van", "border office", "hub 9", "shop warehouse")


def scripts(rng: random.Random) -> Iterator[Script]:
    scenarios = (_late, _damaged, _charged_twice, _address)
    for number in range(7):
        yield scenarios[number % len(scenarios)](number, rng)


def _begin(number: int, group: str, rng: random.Random) -> Script:
    return Script(f"support-{number}", group=group, toolset=TOOLSET, system=_SYSTEM, rng=rng)


def _order(rng: random.Random, state: str, *, num_items: int, num_charges: int = 1) -> dict[str, Any]:
    items: list[dict[str, Any]] = [
        {
            "position": place,
            "name": name,
            "article": article,
            "price": price,
            "pieces": rng.choice((1, 1, 2)),
            "state": state,
        }
        for place, (name, article, price) in enumerate(rng.sample(_ARTICLES, num_items), start=1)
    ]
    total = round(sum(item["price"] * item["pieces"] for item in items), 2)
    return {
        "order": f"L-{rng.randrange(10000, 99999)}",
        "customer": rng.choice(_NAMES),
        "placed": f"2031-04-{rng.randrange(10, 28)}",
        "state": state,
        "items": items,
        "total": total,
        "payments": [{"way": "card", "amount": total, "day": f"2031-04-{rng.randrange(10, 28)}"}] * num_charges,
        "parcels": [f"P{rng.randrange(10**9, 10**10)}"],
        "ship_to": f"{rng.choice(('Mill Lane', 'Harbour Road', 'Elm Street', 'Castle Hill'))} "
        f"{rng.randrange(1, 120)}, {rng.randrange(10000, 99999)}",
        "history": [
            {"day": f"2031-04-{day}", "note": note} for day, note in ((12, "placed"), (13, "paid"), (15, "packed"))
        ],
    }


def _late(number: int, rng: random.Random) -> Script:
    script = _begin(number, "late parcel", rng)
    order = _order(rng, "sent", num_items=rng.randrange(2, 5))
    item, parcel = order["items"][0], order["parcels"][0]
    script.user(
        f"Hi, I'm still waiting for order {order['order']}. It should have been here last week. What's going on?"
    )
    script.call(None, ("get_order", {"order": order["order"]}))
    script.results(order)
    script.call(None, ("track_parcel", {"parcel": parcel}))
    script.results(_tracking(parcel, rng))
    script.say(
        f"I'm sorry, your parcel was last scanned eight days ago. I can refund it or send the {item['name']} again. "
        f"Which would you like?"
    )
    if rng.random() < 0.5:
        script.user("Send it again, but only if you have it in stock.")
        script.call(None, ("stock", {"article": item["article"]}))
        script.results({"article": item["article"], "pieces": rng.randrange(2, 60), "more_on": None})
        script.call(
            None,
            (
                "open_ticket",
                {
                    "topic": "carrier",
                    "summary": f"Parcel {parcel} lost. Second shipment of {order['order']} wanted, in stock.",
                },
            ),
        )
        script.results({"ticket": rng.randrange(10000, 99999)})
        script.say("It is in stock, and a colleague sends it today. You'll get the new parcel number by mail.")
    else:
        script.user("I'd rather have the money back.")
        positions = [entry["position"] for entry in order["items"]]
        script.call(None, ("refund", {"order": order["order"], "items": positions, "reason": "late"}))
        script.results({"refunded": order["total"], "way": "card"})
        script.say(
            f"I've refunded {order['total']:.2f} euro to your card. If the parcel still turns up, just refuse it."
        )
    script.user("Thank you, that was quick!")
    script.say("You're welcome. Enjoy the rest of your day!")
    return script


def _damaged(number: int, rng: random.Random) -> Script:
    script = _begin(number, "damaged item", rng)
    order = _order(rng, "delivered", num_items=3)
    item = rng.choice(order["items"])
    script.user("Hello! Something arrived broken and I'd like my money back.")
    script.say("I'm sorry to hear that. Could you give me the order number, and say in a sentence what is broken?")
    script.user(f"{order['order']}, the {item['name']}. It has a crack all along one side.")
    script.call(None, ("get_order", {"order": order["order"]}))
    script.results(order)
    if item["price"] < 80:
        script.call(None, ("refund", {"order": order["order"], "items": [item["position"]], "reason": "damaged"}))
        script.results({"refunded": item["price"] * item["pieces"], "way": "card"})
        script.say(f"The {item['name']} is refunded to your card. You needn't send it back.")
    else:
        summary = (
            f"{item['name']} of {order['order']} arrived with a crack on one side. Customer wants a refund of "
            f"{item['price']:.2f} euro."
        )
        script.call(None, ("open_ticket", {"topic": "quality", "summary": summary}))
        script.results({"ticket": rng.randrange(10000, 99999)})
        script.say(
            "A colleague looks at this and writes to you within one working day. Please keep the packaging until then."
        )
    if rng.random() < 0.6:
        other = rng.choice(_ARTICLES)
        script.user(f"Alright. By the way, do you have the {other[0]} at the moment?")
        script.call(None, ("stock", {"article": other[1]}))
        script.results(
            {
                "article": other[1],
                "pieces": 0,
                "more_on": f"2031-05-{rng.randrange(10, 28)}",
                "ordered": rng.randrange(20, 200),
            }
        )
        script.say(f"The {other[0]} is sold out just now; more arrive later this month.")
    return script


def _charged_twice(number: int, rng: random.Random) -> Script:
    script = _begin(number, "charged twice", rng)
    is_visible = rng.random() < 0.5
    order = _order(rng, "delivered", num_items=rng.randrange(1, 6), num_charges=2 if is_visible else 1)
    name = order["customer"]
    mail = f"{name.lower().replace(' ', '.')} at mail.example"
    script.user(f"My card was charged twice for the same order! My account is {mail}.")
    script.call(None, ("find_customer", {"key": mail}))
    script.results(
        {
            "customer": name,
            "since": 2026 + rng.randrange(4),
            "orders": [order["order"], f"L-{rng.randrange(10000, 99999)}"],
            "notes": [],
        }
    )
    script.call("I'll look at the newest one.", ("get_order", {"order": order["order"]}))
    script.results(order)
    if is_visible:
        script.call(
            None,
            (
                "refund",
                {
                    "order": order["order"],
                    "items": [entry["position"] for entry in order["items"]],
                    "reason": "charged twice",
                },
            ),
        )
        script.results({"refunded": order["total"], "way": "card"})
        script.say(
            f"You're right, and I've sent the second charge of {order['total']:.2f} euro back to your card. I'm "
            f"sorry for the trouble."
        )
    else:
        summary = f"{name} reports two charges of {order['total']:.2f} euro for {order['order']}; the order shows one."
        script.call(None, ("open_ticket", {"topic": "payment", "summary": summary}))
        script.results({"ticket": rng.randrange(10000, 99999)})
        script.say(
            "I see one charge only, so a colleague checks it with the bank and writes to you within one working day."
        )
    script.user("How long will the money take?")
    script.say("That depends on your bank, so I can't name a day. You'll get a mail as soon as there is news.")
    return script


def _address(number: int, rng: random.Random) -> Script:
    script = _begin(number, "new address", rng)
    order = _order(rng, "packed", num_items=2)
    street = (
        f"{rng.choice(('Garden Row', 'Station Square', 'Birch Avenue'))} {rng.randrange(1, 90)}, "
        f"{rng.randrange(10000, 99999)}"
    )
    script.user(f"I've moved! Can order {order['order']} go to {street} instead?")
    script.call(None, ("get_order", {"order": order["order"]}))
    script.results(order)
    script.call(None, ("change_address", {"order": order["order"], "address": street}))
    script.results({"order": order["order"], "ship_to": street})
    script.say(f"Done: both items of {order['order']} now go to {street}.")
    script.user("Great. And the bill, does it show the new address too?")
    script.say("The bill keeps the address from the day you ordered. If you need it changed, I can ask a colleague.")
    return script


def _tracking(parcel: str, rng: random.Random) -> dict[str, Any]:
    events = [
        {
            "day": f"2031-04-{day:02}",
            "time": f"{rng.randrange(5, 22):02}:{rng.randrange(60):02}",
            "place": rng.choice(_PLACES),
            "event": event,
        }
        for day, event in zip(
            range(24, 12, -2), ("arrived", "left", "arrived", "left", "handed over", "label printed"), strict=False
        )
    ]
    return {
        "parcel": parcel,
        "carrier": rng.choice(("Swift", "Postline", "Nordcargo")),
        "weight_kg": round(rng.uniform(0.4, 14), 1),
        "events": events,
    }
