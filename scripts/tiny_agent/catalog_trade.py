"""Hand-written domains of trade and travel: orders, tickets, products, invoices, parcels, hotels, flights, weather,
arithmetic."""

from __future__ import annotations

from agentspec.replay.world import Locked
from scripts.tiny_agent.template import Template, column, locked
from scripts.tiny_agent.toolset import Toolset, calculator

_orders = Toolset(
    "orders",
    column("order_id", "code", "Order number", label="order number", form="O-####"),
    (
        column("customer", "person", "Name of the customer"),
        column("item", "word", "What is ordered"),
        column("quantity", "count", "How many pieces"),
        column("total", "amount", "Price of the whole order"),
        column("ship_to", "city", "City that it is sent to", label="destination"),
        column("status", "choice", "State of the order", choices="open paid shipped cancelled"),
    ),
)
ORDERS = Template(
    noun="order",
    plural="orders",
    tools=_orders,
    operations=(
        _orders.find(
            "orders_search",
            "search",
            "Search orders by customer, item or status.",
            ("customer", "item", "status"),
            limit="limit",
            show=("order_id", "customer", "item", "status"),
        ),
        _orders.get("orders_get", "get", "Get one order by its number."),
        _orders.create(
            "orders_create",
            "place",
            "Place a new order.",
            ("customer", "item", "quantity", "ship_to"),
            required=("customer", "item", "quantity"),
            fixed={"status": "open"},
        ),
        _orders.update(
            "orders_update",
            "change",
            "Change the quantity or the destination of an order that is not shipped yet.",
            ("quantity", "ship_to"),
            locked=locked("status", "shipped cancelled", "order {key} is {value} and can't be changed"),
        ),
        _orders.close(
            "orders_cancel",
            "cancel",
            "Cancel an order. Shipped orders can't be cancelled.",
            {"status": "cancelled"},
            locked=locked("status", "shipped cancelled", "order {key} is {value} already"),
            show=("order_id", "status"),
        ),
    ),
)

_tickets = Toolset(
    "tickets",
    column("ticket_id", "code", "Number of the ticket", label="ticket number", form="T-####"),
    (
        column("subject", "title", "What it is about"),
        column("requester", "person", "Who asks for help"),
        column("agent", "person", "Who works on it"),
        column("priority", "choice", choices="low medium high urgent"),
        column("status", "choice", choices="open pending closed"),
    ),
)
TICKETS = Template(
    noun="support ticket",
    plural="support tickets",
    tools=_tickets,
    operations=(
        _tickets.find(
            "search_tickets",
            "search",
            "Search support tickets.",
            ("requester", "agent", "priority", "status"),
            show=("ticket_id", "subject", "status"),
        ),
        _tickets.get("get_ticket", "get", "Fetch a support ticket."),
        _tickets.create(
            "open_ticket",
            "open",
            "Open a new support ticket for somebody.",
            ("requester", "subject", "priority"),
            required=("requester", "subject"),
            fixed={"status": "open"},
        ),
        _tickets.update(
            "assign_ticket",
            "assign",
            "Assign a ticket to an agent, and optionally set its priority.",
            ("agent", "priority"),
            required=("agent",),
            locked=locked("status", "closed", "ticket {key} is {value}"),
            show=("ticket_id", "agent", "priority"),
        ),
        _tickets.close(
            "close_ticket",
            "close",
            "Close a ticket that is solved.",
            {"status": "closed"},
            show=("ticket_id", "status"),
        ),
    ),
)

_products = Toolset(
    "products",
    column("sku", "code", "Stock keeping unit", form="SK####"),
    (
        column("name", "word", "Name of the product"),
        column("brand", "word", "Who makes it"),
        column("price", "amount", "Price per piece"),
        column("stock", "count", "Pieces in stock"),
        column("on_sale", "flag", "Whether it is on sale", label="on sale"),
    ),
)
PRODUCTS = Template(
    noun="product",
    plural="products",
    tools=_products,
    operations=(
        _products.find(
            "search_products",
            "search",
            "Search the catalog of products.",
            ("brand", "on_sale"),
            contains={"name": "name"},
            limit="top",
            show=("sku", "name", "price"),
        ),
        _products.get("get_product", "look up", "Get price, stock and brand of a product."),
        _products.update(
            "set_price",
            "price",
            "Set the price of a product.",
            ("price",),
            required=("price",),
            show=("sku", "name", "price"),
        ),
        _products.create(
            "add_product",
            "add",
            "Add a product to the catalog.",
            ("name", "brand", "price", "stock", "on_sale"),
            required=("name", "price"),
        ),
    ),
)

_invoices = Toolset(
    "invoices",
    column("number", "code", "Number of the invoice", label="invoice number", form="INV-#####"),
    (
        column("client", "person", "Who has to pay"),
        column("amount", "amount", "Sum to be paid"),
        column("currency", "choice", choices="EUR USD GBP"),
        column("due_date", "date"),
        column("paid", "flag", "Whether it is paid"),
    ),
)
INVOICES = Template(
    noun="invoice",
    plural="invoices",
    tools=_invoices,
    operations=(
        _invoices.find(
            "invoices_list",
            "list",
            "List invoices of a client, or all that are paid or not.",
            ("client", "paid"),
            show=("number", "client", "amount"),
        ),
        _invoices.get("invoices_show", "show", "Show one invoice.", by={"invoice_number": "number"}),
        _invoices.create(
            "invoices_issue",
            "issue",
            "Issue an invoice.",
            ("client", "amount", "currency", "due_date"),
            required=("client", "amount", "due_date"),
            fixed={"paid": False},
        ),
        _invoices.update(
            "invoices_postpone",
            "postpone",
            "Give an invoice another due date.",
            {"new_due_date": "due_date"},
            by={"invoice_number": "number"},
            required=("new_due_date",),
            show=("number", "due_date"),
        ),
        _invoices.close(
            "invoices_mark_paid",
            "settle",
            "Mark an invoice as paid.",
            {"paid": True},
            by={"invoice_number": "number"},
            locked=Locked(column="paid", values=[True], error="invoice {key} is paid already"),
            show=("number", "paid"),
        ),
    ),
)

_parcels = Toolset(
    "parcels",
    column("tracking_code", "code", "Code on the label of the parcel", form="@@#######"),
    (
        column("sender", "person"),
        column("recipient", "person"),
        column("location", "city", "Where the parcel is now"),
        column("weight", "amount", "Weight in kg"),
        column("express", "flag", "Whether it travels by express"),
        column("status", "choice", choices="registered moving delivered returned"),
    ),
)
PARCELS = Template(
    noun="parcel",
    plural="parcels",
    tools=_parcels,
    operations=(
        _parcels.get("track_parcel", "track", "Track a parcel: where it is and what state it is in."),
        _parcels.find(
            "find_parcels",
            "find",
            "Find parcels by the people on the label.",
            ("sender", "recipient"),
            show=("tracking_code", "recipient", "status"),
        ),
        _parcels.close(
            "return_parcel",
            "return",
            "Send a parcel back to its sender.",
            {"status": "returned"},
            locked=locked("status", "delivered returned", "parcel {key} is {value} already"),
            show=("tracking_code", "status"),
        ),
        _parcels.update(
            "redirect_parcel",
            "redirect",
            "Change the recipient of a parcel on its way.",
            {"new_recipient": "recipient"},
            required=("new_recipient",),
            locked=locked("status", "delivered returned", "parcel {key} is {value} and can't be redirected"),
            show=("tracking_code", "recipient"),
        ),
    ),
)

_hotels = Toolset(
    "bookings",
    column("bookingId", "code", "Id of the booking", label="booking id", form="BK####"),
    (
        column("guest", "person", "Name of the guest"),
        column("hotel", "word", "Name of the hotel"),
        column("city", "city"),
        column("checkIn", "date", "First night, YYYY-MM-DD", label="check-in date"),
        column("nights", "count", "Number of nights", label="number of nights"),
        column("roomType", "choice", "Type of room", label="room type", choices="single double suite"),
    ),
)
HOTELS = Template(
    noun="hotel booking",
    plural="hotel bookings",
    tools=_hotels,
    operations=(
        _hotels.find(
            "searchBookings",
            "search",
            "Search hotel bookings.",
            ("guest", "city", "checkIn"),
            show=("bookingId", "guest", "hotel", "city"),
        ),
        _hotels.get("getBooking", "get", "Get a hotel booking."),
        _hotels.create(
            "bookHotel",
            "book",
            "Book a room in a hotel.",
            ("guest", "hotel", "city", "checkIn", "nights", "roomType"),
            required=("guest", "hotel", "checkIn", "nights"),
        ),
        _hotels.update(
            "changeBooking",
            "change",
            "Change the first night, the number of nights or the type of room.",
            ("checkIn", "nights", "roomType"),
            show=("bookingId", "checkIn", "nights", "roomType"),
        ),
        _hotels.delete("cancelBooking", "cancel", "Cancel a booking; it is removed."),
    ),
)

_flights = Toolset(
    "flights",
    column("flight_no", "code", "Flight number", label="flight number", form="@@###"),
    (
        column("origin", "city", "City of departure"),
        column("destination", "city", "City of arrival"),
        column("date", "date"),
        column("departs", "time", "Time of departure, HH:MM", label="departure time"),
        column("seats_left", "count", "Seats that are free", label="free seats"),
        column("fare", "amount", "Price of a seat"),
    ),
)
FLIGHTS = Template(
    noun="flight",
    plural="flights",
    tools=_flights,
    operations=(
        _flights.find(
            "search_flights",
            "search",
            "Search flights between two cities.",
            {"from_city": "origin", "to_city": "destination", "date": "date"},
            required=("from_city",),
            limit="max_results",
            show=("flight_no", "destination", "date", "fare"),
        ),
        _flights.get("flight_details", "look up", "Details of one flight."),
        _flights.update(
            "delay_flight",
            "delay",
            "Set a later time of departure.",
            {"new_time": "departs"},
            required=("new_time",),
            show=("flight_no", "departs"),
        ),
    ),
)

_weather = Toolset(
    "weather",
    column("city", "city", "City, without its country"),
    (
        column("sky", "choice", "What the sky looks like", choices="sunny cloudy rain snow fog storm"),
        column("temperature", "count", "Degrees"),
        column("wind", "count", "Speed in km/h", label="wind speed"),
        column("humidity", "count", "Per cent"),
    ),
)
WEATHER = Template(
    noun="weather report",
    plural="weather reports",
    tools=_weather,
    operations=(
        _weather.get("get_weather", "get", "Current weather in a city."),
        _weather.find(
            "find_cities_by_sky",
            "find",
            "All cities where the sky looks like this now.",
            ("sky",),
            required=("sky",),
            show=("city", "temperature"),
        ),
    ),
)

CALCULATOR = Template(
    noun="calculation",
    plural="calculations",
    tools=None,
    operations=(calculator("calculate", "calculate", "Evaluate an arithmetic expression.", "expression"),),
)

TEMPLATES = (ORDERS, TICKETS, PRODUCTS, INVOICES, PARCELS, HOTELS, FLIGHTS, WEATHER, CALCULATOR)
