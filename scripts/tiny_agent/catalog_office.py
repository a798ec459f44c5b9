"""Hand-written domains of an office: mail, calendar, contacts, files, tasks, notes."""

from __future__ import annotations

from scripts.tiny_agent.template import Template, column, locked
from scripts.tiny_agent.toolset import Toolset

_mail = Toolset(
    "mail",
    column("id", "code", "Id of the message", label="mail id", form="m-###"),
    (
        column("from", "email", "Address of the sender", label="sender"),
        column("to", "email", "Address of the recipient", label="recipient"),
        column("subject", "title", "Subject line"),
        column("body", "text", "Text of the message", label="text"),
        column("folder", "choice", "Where the message is", choices="inbox sent archive"),
    ),
)
MAIL = Template(
    noun="mail",
    plural="mails",
    tools=_mail,
    operations=(
        _mail.find(
            "search_mail",
            "search",
            "Search the mailbox. All filters are optional and combined.",
            {"sender": "from", "folder": "folder"},
            contains={"subject_contains": "subject"},
            limit="max_results",
            show=("id", "from", "subject"),
        ),
        _mail.get("read_mail", "read", "Read one mail with its full text.", by={"mail_id": "id"}),
        _mail.create(
            "send_mail",
            "send",
            "Send an email to one recipient.",
            ("to", "subject", "body"),
            required=("to", "subject", "body"),
            fixed={"folder": "sent"},
            show=("id", "to", "subject", "folder"),
        ),
        _mail.close(
            "archive_mail",
            "archive",
            "Move a mail to the archive.",
            {"folder": "archive"},
            by={"mail_id": "id"},
            show=("id", "folder"),
        ),
        _mail.delete("delete_mail", "delete", "Delete a mail for good.", by={"mail_id": "id"}),
    ),
)

_calendar = Toolset(
    "events",
    column("event_id", "code", "Id of the event", label="event id", form="ev-###"),
    (
        column("title", "title", "What the event is called"),
        column("date", "date"),
        column("start_time", "time"),
        column("attendees", "people", "Names of the people who take part"),
        column("room", "word", "Where it takes place"),
    ),
)
CALENDAR = Template(
    noun="event",
    plural="events",
    tools=_calendar,
    operations=(
        _calendar.find(
            "calendar_list_events",
            "list",
            "List calendar events, on one day or with one attendee.",
            ("date",),
            contains={"attendee": "attendees"},
            show=("event_id", "title", "date", "start_time"),
        ),
        _calendar.get("calendar_get_event", "get", "Get all details of a calendar event."),
        _calendar.create(
            "calendar_create_event",
            "create",
            "Create a calendar event.",
            ("title", "date", "start_time", "attendees", "room"),
            required=("title", "date", "start_time"),
        ),
        _calendar.update(
            "calendar_move_event",
            "move",
            "Move an event to another date or time.",
            {"new_date": "date", "new_time": "start_time"},
            show=("event_id", "title", "date", "start_time"),
        ),
        _calendar.delete("calendar_delete_event", "delete", "Remove an event from the calendar."),
    ),
)

_contacts = Toolset(
    "contacts",
    column("name", "person", "Name of the person"),
    (
        column("email", "email", "Email address"),
        column("phone", "phone", "Phone number"),
        column("company", "word", "Where the person works"),
        column("city", "city"),
    ),
)
CONTACTS = Template(
    noun="contact",
    plural="contacts",
    tools=_contacts,
    operations=(
        _contacts.find(
            "find_contacts",
            "find",
            "Find contacts by city or company.",
            ("city", "company"),
            show=("name", "city", "company"),
        ),
        _contacts.get("get_contact", "get", "Look up one person in the address book."),
        _contacts.create(
            "add_contact",
            "add",
            "Add a person to the address book.",
            ("name", "email", "phone", "company", "city"),
            required=("name",),
        ),
        _contacts.update(
            "update_contact",
            "update",
            "Change details of a contact. Only what is given changes.",
            ("email", "phone", "company", "city"),
        ),
        _contacts.delete("remove_contact", "remove", "Remove a person from the address book."),
    ),
)

_files = Toolset(
    "files",
    column("path", "path", "Path of the file, relative to the project"),
    (column("content", "page", "The whole text of the file"),),
)
FILES = Template(
    noun="file",
    plural="files",
    tools=_files,
    num_records=(2, 6),
    operations=(
        _files.find(
            "list_files", "list", "List the files of the project.", contains={"name_contains": "path"}, show=("path",)
        ),
        _files.get("read_file", "read", "Read a text file.", verb="read"),
        _files.create(
            "write_file",
            "write",
            "Create a new file with this content.",
            ("path", "content"),
            required=("path", "content"),
            show=("path",),
        ),
        _files.replace(
            "edit_file",
            "edit",
            "Replace a piece of text in a file. The old text must occur exactly once.",
            "content",
            old="old_text",
            new="new_text",
            show=("path",),
        ),
        _files.delete("delete_file", "delete", "Delete a file."),
    ),
)

_pages = Toolset(
    "documents",
    column("doc_id", "code", "Id of the document", label="document id", form="D####"),
    (
        column("title", "title"),
        column("author", "person", "Who wrote it"),
        column("text", "page", "The whole text", label="content"),
    ),
)
DOCUMENTS = Template(
    noun="document",
    plural="documents",
    tools=_pages,
    num_records=(2, 6),
    operations=(
        _pages.find(
            "docs_search",
            "search",
            "Search documents by author or by words of the title.",
            ("author",),
            contains={"query": "title"},
            show=("doc_id", "title", "author"),
        ),
        _pages.get("docs_open", "open", "Open a document and return its text.", verb="read", show=("title", "text")),
        _pages.replace(
            "docs_replace_text",
            "edit",
            "Replace one passage of a document. `find` must occur exactly once.",
            "text",
            old="find",
            new="replace_with",
            show=("doc_id", "title"),
        ),
        _pages.update(
            "docs_rename",
            "rename",
            "Give a document another title.",
            {"new_title": "title"},
            required=("new_title",),
            show=("doc_id", "title"),
        ),
    ),
)

_tasks = Toolset(
    "tasks",
    column("task_id", "code", "Number of the task", label="task number", form="###"),
    (
        column("title", "title", "What is to be done"),
        column("assignee", "person", "Who does it"),
        column("due_date", "date"),
        column("priority", "choice", "How urgent it is", choices="low normal high"),
        column("status", "choice", "State of the task", choices="open done"),
    ),
)
TASKS = Template(
    noun="task",
    plural="tasks",
    tools=_tasks,
    operations=(
        _tasks.find(
            "list_tasks",
            "list",
            "List tasks, all of them or those that match the filters.",
            ("assignee", "status", "priority"),
            limit="limit",
            show=("task_id", "title", "assignee"),
        ),
        _tasks.get("get_task", "show", "Show one task."),
        _tasks.create(
            "create_task",
            "create",
            "Create a task; it starts as open.",
            ("title", "assignee", "due_date", "priority"),
            required=("title",),
            fixed={"status": "open"},
        ),
        _tasks.update(
            "update_task",
            "update",
            "Change assignee, due date or priority of a task.",
            ("assignee", "due_date", "priority"),
        ),
        _tasks.close(
            "complete_task", "complete", "Mark a task as done.", {"status": "done"}, show=("task_id", "status")
        ),
    ),
)

_notes = Toolset(
    "notes",
    column("noteId", "code", "Id of the note", label="note id", form="n###"),
    (
        column("title", "title", "Heading of the note"),
        column("text", "text", "What the note says"),
        column("tags", "tags", "Words to find it by"),
        column("pinned", "flag", "Whether it stays on top"),
    ),
)
NOTES = Template(
    noun="note",
    plural="notes",
    tools=_notes,
    operations=(
        _notes.find(
            "findNotes",
            "find",
            "Find notes by a tag or by words of the title.",
            contains={"tag": "tags", "title": "title"},
            show=("noteId", "title"),
        ),
        _notes.get("getNote", "get", "Get a note with its text and tags."),
        _notes.create(
            "addNote",
            "add",
            "Save a new note.",
            ("title", "text", "tags", "pinned"),
            required=("title", "text"),
            show=("noteId", "title", "tags", "pinned"),
        ),
        _notes.update(
            "editNote", "edit", "Change the text or the tags of a note, or pin it.", ("text", "tags", "pinned")
        ),
        _notes.delete("deleteNote", "delete", "Delete a note."),
    ),
)

_appointments = Toolset(
    "appointments",
    column("appointment_id", "code", "Id of the appointment", label="appointment id", form="AP####"),
    (
        column("patient", "person", "Who has the appointment"),
        column("doctor", "person", "Who is seen"),
        column("date", "date"),
        column("time", "time"),
        column("reason", "text", "Why the patient comes"),
        column("status", "choice", choices="booked cancelled"),
    ),
)
APPOINTMENTS = Template(
    noun="appointment",
    plural="appointments",
    tools=_appointments,
    operations=(
        _appointments.find(
            "find_appointments",
            "find",
            "Find appointments of a patient, of a doctor or on a date.",
            ("patient", "doctor", "date"),
            show=("appointment_id", "patient", "date", "time"),
        ),
        _appointments.get("get_appointment", "get", "Get an appointment."),
        _appointments.create(
            "book_appointment",
            "book",
            "Book an appointment with a doctor.",
            ("patient", "doctor", "date", "time", "reason"),
            required=("patient", "doctor", "date", "time"),
            fixed={"status": "booked"},
        ),
        _appointments.update(
            "reschedule_appointment",
            "reschedule",
            "Change date and time of an appointment.",
            ("date", "time"),
            required=("date", "time"),
            locked=locked("status", "cancelled", "appointment {key} is {value} and can't be moved"),
            show=("appointment_id", "date", "time"),
        ),
        _appointments.close(
            "cancel_appointment",
            "cancel",
            "Cancel an appointment.",
            {"status": "cancelled"},
            show=("appointment_id", "status"),
        ),
    ),
)

TEMPLATES = (MAIL, CALENDAR, CONTACTS, FILES, DOCUMENTS, TASKS, NOTES, APPOINTMENTS)
