// The demo: five tools on a table of orders and a calculator, run in the page. Results have the form of a service's: JSON, errors included.

import { oneLine } from "./json.js";

const text = (description) => ({ type: "string", description });
const count = (description) => ({ type: "integer", minimum: 1, description });

function tool(name, description, properties, required) {
  return { type: "function", function: { name, description, parameters: { type: "object", properties, required } } };
}

export const TOOLS = [
  tool("orders_search", "Search orders by customer, item or status.", {
    customer: text("Name of the customer"),
    item: text("What is ordered"),
    status: { type: "string", enum: ["open", "paid", "shipped", "cancelled"], description: "State of the order" },
  }, []),
  tool("orders_get", "Get one order by its number.", { order_id: text("Order number") }, ["order_id"]),
  tool("orders_create", "Place a new order.", {
    customer: text("Name of the customer"),
    item: text("What is ordered"),
    quantity: count("How many pieces"),
    ship_to: text("City that it is sent to"),
  }, ["customer", "item", "quantity"]),
  tool("orders_update", "Change the quantity or the destination of an order that is not shipped yet.", {
    order_id: text("Order number"),
    quantity: count("How many pieces"),
    ship_to: text("City that it is sent to"),
  }, ["order_id"]),
  tool("orders_cancel", "Cancel an order. Shipped orders can't be cancelled.", { order_id: text("Order number") }, ["order_id"]),
  tool("calculate", "Evaluate an arithmetic expression.", {
    expression: text("Arithmetic expression with + - * / and brackets"),
  }, ["expression"]),
];

export const SUGGESTIONS = [
  "What is the status of order O-4312?",
  "Please cancel order O-4315.",
  "Which orders are open?",
  "Change the destination of order O-4312 to Lisbon.",
  "What is the total of orders O-4312 and O-4313?",
];

const ORDERS = [
  { order_id: "O-4312", customer: "Maya Skinner", item: "desk lamp", quantity: 4, total: 119.6, ship_to: "Bologna", status: "open" },
  { order_id: "O-4313", customer: "Noah Petrov", item: "steel kettle", quantity: 2, total: 84.5, ship_to: "Tallinn", status: "paid" },
  { order_id: "O-4314", customer: "Maya Skinner", item: "wool blanket", quantity: 1, total: 62, ship_to: "Bologna", status: "shipped" },
  { order_id: "O-4315", customer: "Ursula Pham", item: "garden chair", quantity: 6, total: 270, ship_to: "Nice", status: "open" },
];

class Refused extends Error {}

// One session's orders. `run` gives the text of a result; null when the tool is none of these.
export class DemoTools {
  #orders = ORDERS.map((order) => ({ ...order }));

  #actions = {
    orders_search: (asked) =>
      this.#orders
        .filter((order) => Object.entries(asked).every(([column, value]) => same(order[column], value)))
        .map(({ order_id, customer, item, status }) => ({ order_id, customer, item, status })),
    orders_get: ({ order_id }) => this.#find(order_id),
    orders_create: (given) => {
      const last = Math.max(...this.#orders.map((order) => Number(order.order_id.slice(2))));
      const order = { order_id: `O-${last + 1}`, ...given, status: "open" };
      this.#orders.push(order);
      return order;
    },
    orders_update: ({ order_id, ...given }) => Object.assign(this.#changeable(order_id, "and can't be changed"), given),
    orders_cancel: ({ order_id }) => {
      const order = this.#changeable(order_id, "already");
      order.status = "cancelled";
      return { order_id: order.order_id, status: order.status };
    },
    calculate: ({ expression }) => ({ result: calculate(expression) }),
  };

  run(name, argumentsJson) {
    if (!Object.hasOwn(this.#actions, name)) return null;
    try {
      return oneLine(this.#actions[name](checked(name, argumentsJson)));
    } catch (error) {
      if (error instanceof Refused) return oneLine({ error: error.message });
      throw error;
    }
  }

  #find(orderId) {
    const order = this.#orders.find((candidate) => same(candidate.order_id, orderId));
    if (!order) throw new Refused(`not found: order_id '${orderId}'`);
    return order;
  }

  #changeable(orderId, refusal) {
    const order = this.#find(orderId);
    if (["shipped", "cancelled"].includes(order.status)) throw new Refused(`order ${order.order_id} is ${order.status} ${refusal}`);
    return order;
  }
}

// The arguments, if they are what the tool's schema asks for.
function checked(name, argumentsJson) {
  const { properties, required } = TOOLS.find((candidate) => candidate.function.name === name).function.parameters;
  const given = parsed(argumentsJson);
  for (const key of required) if (!(key in given)) throw new Refused(`'${key}' is required`);
  for (const [key, value] of Object.entries(given)) {
    if (!Object.hasOwn(properties, key)) throw new Refused(`unknown parameter '${key}'`);
    const fits = properties[key].type === "integer" ? Number.isInteger(value) && value >= 1 : typeof value === "string";
    if (!fits) throw new Refused(`${key}: ${JSON.stringify(value)} is no ${properties[key].type === "integer" ? "number of pieces" : "text"}`);
    if (properties[key].enum && !properties[key].enum.includes(value)) throw new Refused(`${key}: '${value}' is not one of ${properties[key].enum.join(", ")}`);
  }
  return given;
}

function parsed(argumentsJson) {
  let given = null;
  try {
    given = JSON.parse(argumentsJson);
  } catch {
    throw new Refused("the arguments are not valid JSON");
  }
  if (given === null || typeof given !== "object" || Array.isArray(given)) throw new Refused("the arguments must be an object");
  return given;
}

function same(left, right) {
  return String(left).toLowerCase() === String(right).toLowerCase();
}

// Numbers, + - * / and brackets, rounded to six decimals: sum = product ± product, product = factor */ factor.
export function calculate(expression) {
  const tokens = expression.match(/\d+\.?\d*|\.\d+|[-+*/()]|\S/g) ?? [];
  const wrong = () => new Refused(`can't evaluate '${expression}'`);
  let at = 0;

  function chain(next, operators) {
    let value = next();
    while (tokens[at] in operators) value = operators[tokens[at++]](value, next());
    return value;
  }
  const sum = () => chain(product, { "+": (a, b) => a + b, "-": (a, b) => a - b });
  const product = () => chain(factor, { "*": (a, b) => a * b, "/": (a, b) => a / b });
  function factor() {
    const token = tokens[at++];
    if (token === "-") return -factor();
    if (token === "(") {
      const value = sum();
      if (tokens[at++] !== ")") throw wrong();
      return value;
    }
    if (token === undefined || !/^[\d.]/.test(token) || Number.isNaN(Number(token))) throw wrong();
    return Number(token);
  }

  const value = sum();
  if (at !== tokens.length) throw wrong();
  if (!Number.isFinite(value)) throw new Refused("division by zero");
  return Math.round(value * 1e6) / 1e6;
}
