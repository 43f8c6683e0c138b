// Runs in the browser for perfetto_check.py: Perfetto's trace processor, as the worker that its own page uses, reads each
// trace and answers each query. `job` is defined before. Messages are TraceProcessorRpc of trace_processor.proto.
const APPEND = 1, FINALIZE = 2, QUERY = 3; // TraceProcessorMethod
const BLOCK = 1 << 24; // bytes of a trace in a message; the processor takes 32 MiB

function varint(number) {
  const bytes = [];
  for (; number > 127; number = Math.floor(number / 128)) bytes.push((number % 128) | 128);
  return [...bytes, number];
}

function lengthDelimited(field, bytes) {
  const head = [...varint(field * 8 + 2), ...varint(bytes.length)];
  const whole = new Uint8Array(head.length + bytes.length);
  whole.set(head);
  whole.set(bytes, head.length);
  return whole;
}

function request(sequence, method, field, body) {
  const head = [8, ...varint(sequence), 16, method]; // seq = 1, request = 2
  const message = new Uint8Array(head.length + (body?.length ?? 0) + 10);
  message.set(head);
  const tail = body ? lengthDelimited(field, body) : [];
  message.set(tail, head.length);
  return lengthDelimited(1, message.subarray(0, head.length + tail.length)); // a TraceProcessorRpcStream
}

// [field, value] of a message: numbers of varints, bytes of all else.
function* fields(bytes) {
  let at = 0;
  const next = () => {
    let value = 0n, shift = 0n;
    for (;; shift += 7n) {
      const byte = bytes[at++];
      value |= BigInt(byte & 127) << shift;
      if (byte < 128) return Number(BigInt.asIntN(64, value));
    }
  };
  while (at < bytes.length) {
    const tag = next(), kind = tag & 7;
    if (kind === 0) yield [tag >> 3, next()];
    else {
      const length = kind === 2 ? next() : kind === 1 ? 8 : 4;
      yield [tag >> 3, bytes.subarray(at, (at += length))];
    }
  }
}

const text = (bytes) => new TextDecoder().decode(bytes);

// CellsBatch of a QueryResult: the kinds of all cells, then the values of each kind in their order.
function cells(batch) {
  let kinds = [], numbers = [], doubles = [], texts = [], last = false;
  for (const [field, value] of fields(batch)) {
    if (field === 1) kinds = [...value];
    else if (field === 2) numbers = [...packed(value)];
    else if (field === 3) doubles = [...new Float64Array(value.slice().buffer)];
    else if (field === 5) texts = text(value).split("\0");
    else if (field === 6) last = Boolean(value);
  }
  const take = { 1: () => null, 2: () => numbers.shift(), 3: () => doubles.shift(), 4: () => texts.shift() };
  return { values: kinds.map((kind) => take[kind]()), last };
}

function* packed(bytes) {
  for (let at = 0; at < bytes.length; ) {
    let value = 0n, shift = 0n, byte;
    do {
      byte = bytes[at++];
      value |= BigInt(byte & 127) << shift;
      shift += 7n;
    } while (byte > 127);
    yield Number(BigInt.asIntN(64, value));
  }
}

class Processor {
  constructor(bundle) {
    this.worker = new Worker(bundle);
    const { port1, port2 } = new MessageChannel();
    this.port = port1;
    this.worker.onerror = (event) => this.fail?.(new Error(`the worker ended: ${event.message}`));
    this.worker.postMessage(port2, [port2]);
    this.sequence = 0;
  }

  // Calls take(field, value) for each field of each answer until it returns true.
  send(method, field, body, take) {
    return new Promise((go, fail) => {
      this.fail = fail;
      this.port.onmessage = ({ data }) => {
        for (const [, message] of fields(data))
          for (const [key, value] of fields(message)) {
            if (key === 5) return fail(new Error(text(value))); // fatal_error
            if (take(key, value)) return go();
          }
      };
      this.port.postMessage(request(++this.sequence, method, field, body));
    });
  }

  async read(bytes) {
    let error = null;
    const taken = (key, value) => {
      if (key !== 201 && key !== 216) return key === 3 && value === FINALIZE && !error; // append_result, finalize's
      for (const [field, words] of fields(value)) if (field === (key === 201 ? 2 : 1)) error = text(words);
      return true;
    };
    for (let at = 0; at < bytes.length && !error; at += BLOCK)
      await this.send(APPEND, 101, bytes.subarray(at, at + BLOCK), taken);
    if (!error) await this.send(FINALIZE, 0, null, taken);
    return error;
  }

  async query(sql) {
    const values = [], columns = [];
    let error = null;
    await this.send(QUERY, 103, lengthDelimited(1, new TextEncoder().encode(sql)), (key, result) => {
      let last = false;
      if (key !== 203) return false; // query_result
      for (const [field, value] of fields(result))
        if (field === 1) columns.push(text(value));
        else if (field === 2) error = text(value);
        else if (field === 3) {
          const batch = cells(value);
          values.push(...batch.values);
          last = batch.last;
        }
      return last || error;
    });
    if (error) throw new Error(`${sql}: ${error}`);
    return Array.from({ length: values.length / columns.length }, (_, row) =>
      values.slice(row * columns.length, (row + 1) * columns.length));
  }
}

(async () => {
  let answer;
  try {
    answer = [];
    for (const trace of job.traces) {
      const processor = new Processor(job.bundle);
      const error = await processor.read(new Uint8Array(await (await fetch(trace)).arrayBuffer()));
      const rows = [];
      for (const sql of job.queries) rows.push(error ? null : await processor.query(sql));
      answer.push({ error, rows });
      processor.worker.terminate();
    }
  } catch (error) {
    answer = { failed: `${error}` };
  }
  await fetch("/__found", { method: "POST", body: JSON.stringify(answer) });
})();
