// Modules, functions, declarations: the outer structure of PTX.
#include <algorithm>
#include <charconv>
#include <cstring>
#include <map>

#include "handlers.h"
#include "machine.h"
#include "scan.h"
#include "statement.h"

namespace hep::ptxm {

void fail_at(u32 line, const std::string& what) { throw LoadError("PTX line " + std::to_string(line) + ": " + what); }
u8 type_bytes(std::string_view t) {
  if (t == "pred") return kPredicate;
  static constexpr std::string_view kBits[] = {"8", "16", "32", "64"};
  if (t.size() < 2 || !std::strchr("busf", t[0])) return 0;
  for (u32 k = 0; k < 4; ++k)
    if (t.substr(1) == kBits[k]) return u8(1u << k);
  return 0;
}
bool Statement::has(std::string_view word) const { return std::find(words.begin(), words.end(), word) != words.end(); }
u32 Draft::constant(u64 value, u8 bytes) {
  if (bytes != 8 && bytes != kPredicate) value &= (1ull << (8 * bytes)) - 1;
  const auto [place, fresh] = constant_places->try_emplace({value, bytes}, 0);
  if (!fresh) return place->second;
  const u32 row_bytes = bytes == kPredicate ? 8 : bytes * kLanes;
  std::vector<u64>& all = *constants;
  const u32 at = u32(all.size() * 8);
  all.resize(all.size() + row_bytes / 8);
  u8* row = reinterpret_cast<u8*>(all.data()) + at;
  if (bytes == kPredicate) value = value ? ~0ull : 0;
  for (u32 k = 0; k < row_bytes; k += bytes == kPredicate ? 8 : bytes)
    std::memcpy(row + k, &value, bytes == kPredicate ? 8 : bytes);
  return place->second = at | kConstant;
}

namespace {

u32 round_up(u32 n, u32 to) { return (n + to - 1) / to * to; }

class Parser {
 public:
  Parser(std::string_view text, std::string name) : tokens_(scan(text)) { module_->name = std::move(name); }

  std::shared_ptr<const Module> run() {
    declare_all();
    for (Body& body : bodies_)
      if (!body.entry) compile(body);
    const u32 functions_rows = rows_;
    for (Body& body : bodies_)
      if (body.entry) rows_ = functions_rows, compile(body);
    link();
    return module_;
  }

 private:
  struct Body {
    std::string name;
    bool entry;
    size_t at;  // the token behind its opening brace
    Kernel kernel;
    std::vector<Function::Argument> args;
  };
  struct Symbol {
    enum { kShared, kGlobal } space;
    u64 value;
  };
  struct Register {
    u32 number;
    u8 bytes;
  };
  struct Local {  // an argument that a call builds: its place in the frame comes with the call
    std::vector<size_t> stores;
  };
  struct Scope {
    std::map<std::string_view, Register> registers;
    std::map<std::string_view, Local> params;
  };

  // ---- Tokens
  const Token& peek(size_t ahead = 0) const { return tokens_[std::min(at_ + ahead, tokens_.size() - 1)]; }
  bool is(std::string_view t) const { return peek().text == t; }
  std::string_view take() { return tokens_[at_ + 1 < tokens_.size() ? at_++ : at_].text; }
  bool accept(std::string_view t) { return is(t) && (take(), true); }
  void expect(std::string_view t) {
    if (!accept(t)) fail("expected '" + std::string(t) + "', found '" + std::string(peek().text) + "'");
  }
  [[noreturn]] void fail(const std::string& what) const { fail_at(peek().line, what); }
  u64 number(std::string_view t) const {
    if (t.back() == 'U') t.remove_suffix(1);
    if (t.substr(0, 2) == "0f" || t.substr(0, 2) == "0d") return parse<u64>(t.substr(2), 16);
    if (t[0] == '-') return u64(-s64(parse<u64>(t.substr(1), 10)));
    if (t.substr(0, 2) == "0x") return parse<u64>(t.substr(2), 16);
    return parse<u64>(t, 10);
  }
  template <class T>
  T parse(std::string_view t, int base) const {
    T v = 0;
    const auto [end, error] = std::from_chars(t.data(), t.data() + t.size(), v, base);
    if (error != std::errc() || end != t.data() + t.size()) fail("'" + std::string(t) + "' is no number");
    return v;
  }
  u32 take_u32() { return u32(number(take())); }

  // ---- Declarations
  void declare_all() {
    bool function = false, entry = false;
    while (!peek().text.empty()) {
      const std::string_view t = peek().text;
      if (t == ".version" || t == ".address_size") take(), take();
      else if (t == ".target") take(), target(take());
      else if (t == ".file") file();
      else if (t == ".visible" || t == ".weak" || t == ".extern") take();
      else if (t == ".entry" || t == ".func") entry = t == ".entry", function = true, take();
      else if (function) declare_function(entry), function = false;
      else if (t == ".shared" || t == ".global" || t == ".const") take(), variable(t);
      else fail("unknown declaration '" + std::string(t) + "'");
    }
    for (auto& [name, align] : dynamic_) symbols_[name].value = kSharedBase + (dynamic_begin_ = round_up(shared_, align));
    for (Body& b : bodies_) b.kernel.static_shared = dynamic_.empty() ? shared_ : dynamic_begin_;
  }
  void target(std::string_view t) {
    if (t.substr(0, 3) != "sm_") fail("unknown target");
    size_t n = 3;
    while (n < t.size() && std::isdigit(u8(t[n]))) ++n;
    module_->target = parse<u32>(t.substr(3, n - 3), 10);
  }
  void file() {
    take();
    const u32 n = take_u32();
    std::string_view path = take();
    path = path.substr(1, path.size() - 2);
    path = path.substr(path.rfind('/') + 1);
    if (module_->files.size() <= n) module_->files.resize(n + 1);
    module_->files[n] = path;
    while (accept(",")) take();  // time and size
  }
  void variable(std::string_view space) {
    u32 align = 1, bytes = 0, count = 1;
    for (; peek().text[0] == '.'; take()) {
      if (is(".align")) take(), align = u32(number(peek().text));
      else if (u8 n = type_bytes(peek().text.substr(1))) bytes = n;
      else fail("unknown attribute of a variable");
    }
    const std::string_view name = take();
    if (accept("[")) count = is("]") ? 0 : take_u32(), expect("]");
    align = std::max(align, bytes);
    if (space == ".shared") {
      const u32 at = round_up(shared_, align);
      symbols_[name] = {Symbol::kShared, kSharedBase + at};
      if (count) shared_ = at + count * bytes;
      else dynamic_.push_back({name, align});
    } else {
      auto data = std::make_shared<std::vector<u64>>(u64(count) * bytes / 8 + 2);
      u8* base = reinterpret_cast<u8*>(data->data());
      if (accept("=")) initial_values(base, bytes, count);
      symbols_[name] = {Symbol::kGlobal, reinterpret_cast<u64>(base)};
      module_->variables.push_back({std::string(name), base, u64(count) * bytes});
      storage_->push_back(std::move(data));
    }
    expect(";");
  }
  void initial_values(u8* base, u32 bytes, u32 count) {
    const bool list = accept("{");
    for (u32 k = 0; k < count && !is("}"); ++k) {
      const u64 v = number(take());
      std::memcpy(base + u64(k) * bytes, &v, bytes);
      if (!accept(",")) break;
    }
    if (list) expect("}");
  }
  void declare_function(bool entry) {
    Body b{};
    b.entry = entry, b.name = take();
    if (b.name == "(") fail("a function with a result");
    b.kernel.name = b.name;
    if (accept("(")) parameters(b);
    for (; !is("{") && !is(";"); take()) {
      if (is(".maxntid")) {
        take(), b.kernel.max_threads = u32(number(peek().text));
        while (peek(1).text == ",") take(), take(), b.kernel.max_threads *= u32(number(peek().text));
      } else if (is(".minnctapersm")) {
        take(), b.kernel.min_blocks = u32(number(peek().text));
      } else {
        fail("unknown directive '" + std::string(peek().text) + "'");
      }
    }
    if (accept(";")) return;
    expect("{");
    b.at = at_;
    for (int depth = 1; depth;) {
      const std::string_view t = take();
      if (t.empty()) fail("a function without an end");
      depth += t == "{" ? 1 : t == "}" ? -1 : 0;
    }
    bodies_.push_back(std::move(b));
  }
  void parameters(Body& b) {
    u32 end = 0;
    while (!accept(")")) {
      u32 align = 1, bytes = 0, count = 1;
      for (expect(".param"); peek().text[0] == '.'; take()) {
        if (is(".align")) take(), align = u32(number(peek().text));
        else if (is(".ptr") || is(".global")) continue;
        else if (u8 n = type_bytes(peek().text.substr(1))) bytes = n;
        else fail("unknown attribute of a parameter");
      }
      const std::string name(take());
      if (accept("[")) count = take_u32(), expect("]");
      align = b.entry ? std::max(align, bytes) : 8;
      end = round_up(end, align);
      b.kernel.params.push_back({name, end, bytes * count});
      if (!b.entry) b.args.push_back({name, program_->frame_bytes + end, bytes * count});
      end += bytes * count;
      accept(",");
    }
    b.kernel.param_bytes = end;
    if (!b.entry) program_->frame_bytes += round_up(end, 8);
  }

  // ---- Bodies
  void compile(Body& body) {
    body_ = &body, at_ = body.at, draft_ = Draft{}, draft_.constants = &program_->constants;
    draft_.constant_places = &constant_places_;
    scopes_.assign(1, Scope{}), labels_.clear(), branches_.clear(), file_ = line_ = 0, used_bytes_ = 0xffff;
    while (!scopes_.empty()) {
      if (accept("{")) scopes_.emplace_back();
      else if (accept("}")) scopes_.pop_back();
      else if (is(".loc")) location();
      else if (peek().text[0] == '.') directive();
      else if (peek(1).text == ":") labels_[take()] = u32(draft_.code.size()), take();
      else if (!accept(";")) statement();
    }
    Ins end;
    end.run = do_return, end.kind = Kind::kCollective, end.name = "ret";
    if (draft_.code.empty() || draft_.code.back().run != do_return) draft_.code.push_back(end);
    for (auto& [index, label] : branches_) {
      if (!labels_.count(label)) fail_at(draft_.code[index].line, "no label " + std::string(label));
      draft_.code[index].target = labels_[label];
    }
    Function f;
    f.name = body.name, f.begin = u32(program_->code.size()), f.first_row = rows_, f.args = body.args;
    f.row_bytes = allocate_rows(draft_, rows_);
    rows_ += f.row_bytes;
    for (Ins i : draft_.code) {
      if (i.kind == Kind::kBranch) i.target += f.begin;
      program_->code.push_back(i);
    }
    f.end = u32(program_->code.size());
    if (body.entry) entries_.push_back({f.begin, rows_}), module_->kernels.push_back(body.kernel);
    program_->functions.push_back(std::move(f));
  }
  void location() {  // .loc FILE LINE COLUMN [, function_name LABEL, inlined_at FILE LINE COLUMN]
    take(), file_ = take_u32();
    if (const u32 line = take_u32()) line_ = line;
    take();
    while (accept(",")) {
      if (take() == "function_name") take();
      else take(), take(), take();
    }
  }
  void directive() {
    const std::string_view word = take();
    if (word == ".reg") {
      declare_registers();
    } else if (word == ".param") {
      std::string_view name;
      for (; !is(";"); take())
        if (peek().text[0] != '.' && !std::isdigit(u8(peek().text[0])) && name.empty()) name = peek().text;
      scopes_.back().params[name];
    } else if (word == ".pragma") {
      const std::string_view text = take();
      if (text.substr(0, 16) == "\"used_bytes_mask") used_bytes_ = u16(number(text.substr(17, text.size() - 18)));
    } else {
      fail("unknown directive '" + std::string(word) + "'");
    }
    expect(";");
  }
  void declare_registers() {
    const std::string_view type = take().substr(1);
    const u8 bytes = type_bytes(type);
    if (!bytes) fail("unknown type of a register");
    const u8 held = bytes == 1 && type != "pred" ? 2 : bytes;
    do {
      const std::string_view name = take();
      if (accept("<")) {
        const u32 count = take_u32();
        for (u32 k = 0; k < count; ++k) {
          names_.push_back(std::make_unique<std::string>(std::string(name) + std::to_string(k)));
          scopes_.back().registers[*names_.back()] = {draft_.fresh(held), held};
        }
        expect(">");
      } else {
        scopes_.back().registers[name] = {draft_.fresh(held), held};
      }
    } while (accept(","));
  }
  const Register* find_register(std::string_view name) const {
    for (auto s = scopes_.rbegin(); s != scopes_.rend(); ++s)
      if (const auto it = s->registers.find(name); it != s->registers.end()) return &it->second;
    return nullptr;
  }
  Local* find_param(std::string_view name) {
    for (auto s = scopes_.rbegin(); s != scopes_.rend(); ++s)
      if (const auto it = s->params.find(name); it != s->params.end()) return &it->second;
    return nullptr;
  }

  void statement() {
    Ins ins;
    ins.line = peek().line, ins.file = file_, ins.source_line = line_;
    if (accept("@")) {
      ins.guard_not = accept("!");
      const Register* p = find_register(take());
      if (!p || p->bytes != kPredicate) fail("a guard that is no predicate");
      ins.guard = p->number;
    }
    Statement s;
    s.line = ins.line, s.opcode = take(), s.used_bytes = used_bytes_, used_bytes_ = 0xffff;
    for (size_t from = 0; from <= s.opcode.size();) {
      const size_t to = std::min(s.opcode.find('.', from), s.opcode.size());
      s.words.push_back(s.opcode.substr(from, to - from)), from = to + 1;
    }
    ins.name = name_of(s.opcode);
    if (s.words[0] == "call") return call(ins);
    if (!is(";")) {
      do {
        s.operands.push_back(operand());
      } while (accept(","));
    }
    expect(";");
    if (s.words[0] == "bra") {
      ins.kind = Kind::kBranch;
      branches_.push_back({draft_.code.size(), s.operands.at(0).text});
      draft_.code.push_back(ins);
      return;
    }
    const bool to_argument = s.opcode.substr(0, 8) == "st.param";
    if (to_argument) argument(s);
    decode(s, ins, draft_);
  }
  // st.param [param2+4], x: its place in the frame is the callee's, known at the call.
  void argument(const Statement& s) {
    Local* local = find_param(s.operands.at(0).parts.at(0).text);
    if (!local) fail_at(s.line, "st.param to no argument");
    local->stores.push_back(draft_.code.size());
  }
  void call(Ins ins) {
    const std::string_view callee = take();
    const auto body = std::find_if(bodies_.begin(), bodies_.end(), [&](const Body& b) { return b.name == callee; });
    if (body == bodies_.end() || body->entry) fail("a call of " + std::string(callee) + ", which is not here");
    size_t k = 0;
    if (accept(",")) {
      expect("(");
      for (; !accept(")"); accept(",")) {
        Local* local = find_param(take());
        if (!local || k >= body->args.size()) fail("an argument that the function does not have");
        for (size_t store : local->stores) draft_.code[store].offset += body->args[k].offset;
        local->stores.clear(), ++k;
      }
    }
    if (k != body->args.size()) fail("a call with " + std::to_string(k) + " arguments");
    expect(";");
    ins.run = do_call, ins.kind = Kind::kCollective;
    calls_.push_back({program_->code.size() + draft_.code.size(), std::string(callee)});
    draft_.code.push_back(ins);
  }
  const char* name_of(std::string_view opcode) {
    return opcodes_->try_emplace(std::string(opcode), 0).first->first.c_str();
  }

  // ---- Operands
  Operand operand() {
    Operand o = simple_operand();
    if (accept("|")) {  // d|p
      Operand pair;
      pair.type = Operand::kVector, pair.parts = {o, simple_operand()};
      return pair;
    }
    return o;
  }
  Operand simple_operand() {
    Operand o;
    if (accept("{")) {
      o.type = Operand::kVector;
      do {
        o.parts.push_back(simple_operand());
      } while (accept(","));
      expect("}");
    } else if (accept("[")) {
      o.type = Operand::kAddress;
      o.parts.push_back(simple_operand());
      o.param = o.parts[0].param;
      if (accept("+")) o.offset = s64(number(take()));
      expect("]");
    } else {
      o.text = take(), name(o);
    }
    return o;
  }
  void name(Operand& o) {
    const std::string_view t = o.text;
    if (t == "_") {
      o.type = Operand::kSink;
    } else if (const Register* r = find_register(t)) {
      o.type = Operand::kRegister, o.reg = r->number, o.bytes = r->bytes;
    } else if (std::isdigit(u8(t[0])) || t[0] == '-') {
      o.type = Operand::kNumber, o.value = number(t);
    } else if (const auto s = symbols_.find(t); s != symbols_.end()) {
      o.type = Operand::kNumber, o.value = s->second.value;
    } else if (t[0] == '%') {
      o.type = Operand::kSpecial;
    } else {
      const auto& params = body_->kernel.params;
      for (size_t k = 0; k < params.size(); ++k)
        if (params[k].name == t) {
          o.type = Operand::kNumber, o.param = !body_->entry;
          o.value = body_->entry ? params[k].offset : body_->args[k].offset;
        }
    }
  }

  void link() {
    for (auto& [index, callee] : calls_)
      for (const Function& f : program_->functions)
        if (f.name == callee) program_->code[index].target = f.begin;
    module_->storage = std::make_shared<Keep>(Keep{storage_, opcodes_});
    program_->files = module_->files, program_->variables = module_->variables;
    for (size_t k = 0; k < module_->kernels.size(); ++k) {
      program_->entries.push_back({entries_[k].pc, entries_[k].row_bytes});
      module_->kernels[k].program = program_;
      module_->kernels[k].index = u32(k);
    }
  }

  struct Keep {
    std::shared_ptr<void> storage, opcodes;
  };
  std::vector<Token> tokens_;
  size_t at_ = 0;
  std::shared_ptr<Module> module_ = std::make_shared<Module>();
  std::shared_ptr<Program> program_ = std::make_shared<Program>();
  std::shared_ptr<std::vector<std::shared_ptr<void>>> storage_ = std::make_shared<std::vector<std::shared_ptr<void>>>();
  std::shared_ptr<std::map<std::string, int>> opcodes_ = std::make_shared<std::map<std::string, int>>();
  std::map<std::string_view, Symbol> symbols_;
  std::vector<std::pair<std::string_view, u32>> dynamic_;
  u32 shared_ = 0, dynamic_begin_ = 0, rows_ = 0;
  std::vector<Body> bodies_;
  std::vector<EntryCode> entries_;
  std::map<std::pair<u64, u8>, u32> constant_places_;
  std::vector<std::pair<size_t, std::string>> calls_;
  // of the body at hand
  Body* body_ = nullptr;
  Draft draft_;
  std::vector<Scope> scopes_;
  std::vector<std::unique_ptr<std::string>> names_;
  std::map<std::string_view, u32> labels_;
  std::vector<std::pair<size_t, std::string_view>> branches_;
  u32 file_ = 0, line_ = 0;
  u16 used_bytes_ = 0xffff;
};

}  // namespace

std::shared_ptr<const Module> load(std::string_view text, std::string name) {
  try {
    return Parser(text, name).run();
  } catch (const LoadError& e) {
    throw LoadError(name + ": " + e.what());
  }
}
const Kernel* Module::find(std::string_view kernel) const {
  for (const Kernel& k : kernels)
    if (k.name == kernel) return &k;
  return nullptr;
}

}  // namespace hep::ptxm
