// JSON text as people and services write it: on one line, with a space behind each comma and colon.

export function oneLine(value) {
  return JSON.stringify(value, null, 1) // newlines stand between values only, never inside a string
    .replace(/([{[])\n\s*/g, "$1")
    .replace(/\n\s*([}\]])/g, "$1")
    .replace(/\n\s*/g, " ");
}
