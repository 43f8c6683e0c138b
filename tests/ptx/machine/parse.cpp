// The bodies of functions: scopes, registers, labels, statements.
#include <algorithm>
#include <cstring>

#include "declarations.h"
#include "handlers.h"

namespace hep::ptxm {

void fail_at(u32 line, const std::string& what) {
  throw LoadError("PTX line " + std::to_string(line) + ": " + what);
}
u8 type_bytes(std::string_view t) {
  if (t == "pred") return kPredicate;
  static constexpr std::string_view kBits[] = {"8", "16", "32", "64"};
  if (t.size() < 2 || !std::strchr("busf", t[0])) return 0;
  for (u32 k = 0; k < 4; ++k)
    if (t.substr(1) == kBits[k]) return u8(1u << k);
  return 0;
}
bool Statement::has(std::string_view word) const {
  return std::find(words.begin(), words.end(), word) != words.end();
}
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

class Parser {
 public:
  Parser(std::string_view text, std::string name) : t_(text), d_(declare_all(t_, std::move(name))) {}

  std::shared_ptr<const Module> run() {
    for (Body& body : d_.bodies)
      if (!body.entry) compile(body);
    const u32 functions_rows = rows_;
    for (Body& body : d_.bodies)
      if (body.entry) {
        rows_ = functions_rows;
        compile(body);
      }
    link();
    return d_.module;
  }

 private:
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

  void compile(Body& body) {
    body_ = &body;
    t_.go_to(body.at);
    draft_ = Draft{};
    draft_.constants = &d_.program->constants;
    draft_.constant_places = &constant_places_;
    scopes_.assign(1, Scope{});
    labels_.clear();
    branches_.clear();
    file_ = line_ = 0;
    used_bytes_ = 0xffff;
    while (!scopes_.empty()) {
      if (t_.accept("{"))
        scopes_.emplace_back();
      else if (t_.accept("}"))
        scopes_.pop_back();
      else if (t_.is(".loc"))
        location();
      else if (t_.peek().text[0] == '.')
        directive();
      else if (t_.peek(1).text == ":") {
        labels_[t_.take()] = u32(draft_.code.size());
        t_.take();
      } else if (!t_.accept(";"))
        statement();
    }
    Ins end;
    end.run = do_return;
    end.kind = Kind::kCollective;
    end.name = "ret";
    if (draft_.code.empty() || draft_.code.back().run != do_return) draft_.code.push_back(end);
    for (auto& [index, label] : branches_) {
      if (!labels_.count(label)) fail_at(draft_.code[index].line, "no label " + std::string(label));
      draft_.code[index].target = labels_[label];
    }
    Function f;
    f.name = body.name;
    f.begin = u32(d_.program->code.size());
    f.first_row = rows_;
    f.args = body.args;
    f.row_bytes = allocate_rows(draft_, rows_);
    rows_ += f.row_bytes;
    for (Ins i : draft_.code) {
      if (i.kind == Kind::kBranch) i.target += f.begin;
      d_.program->code.push_back(i);
    }
    f.end = u32(d_.program->code.size());
    if (body.entry) {
      entries_.push_back({f.begin, rows_});
      d_.module->kernels.push_back(body.kernel);
    }
    d_.program->functions.push_back(std::move(f));
  }
  void location() {  // .loc FILE LINE COLUMN [, function_name LABEL, inlined_at FILE LINE COLUMN]
    t_.take();
    file_ = t_.take_u32();
    if (const u32 line = t_.take_u32()) line_ = line;
    t_.take();
    while (t_.accept(",")) {
      if (t_.take() == "function_name")
        t_.take();
      else {
        t_.take();
        t_.take();
        t_.take();
      }
    }
  }
  void directive() {
    const std::string_view word = t_.take();
    if (word == ".reg") {
      declare_registers();
    } else if (word == ".param") {
      std::string_view name;
      for (; !t_.is(";"); t_.take())
        if (t_.peek().text[0] != '.' && !std::isdigit(u8(t_.peek().text[0])) && name.empty()) name = t_.peek().text;
      scopes_.back().params[name];
    } else if (word == ".pragma") {
      const std::string_view text = t_.take();
      if (text.substr(0, 16) == "\"used_bytes_mask") used_bytes_ = u16(t_.number(text.substr(17, text.size() - 18)));
    } else {
      t_.fail("unknown directive '" + std::string(word) + "'");
    }
    t_.expect(";");
  }
  void declare_registers() {
    const std::string_view type = t_.take().substr(1);
    const u8 bytes = type_bytes(type);
    if (!bytes) t_.fail("unknown type of a register");
    const u8 held = bytes == 1 && type != "pred" ? 2 : bytes;
    do {
      const std::string_view name = t_.take();
      if (t_.accept("<")) {
        const u32 count = t_.take_u32();
        for (u32 k = 0; k < count; ++k) {
          names_.push_back(std::make_unique<std::string>(std::string(name) + std::to_string(k)));
          scopes_.back().registers[*names_.back()] = {draft_.fresh(held), held};
        }
        t_.expect(">");
      } else {
        scopes_.back().registers[name] = {draft_.fresh(held), held};
      }
    } while (t_.accept(","));
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
    ins.line = t_.peek().line;
    ins.file = file_;
    ins.source_line = line_;
    if (t_.accept("@")) {
      ins.guard_not = t_.accept("!");
      const Register* p = find_register(t_.take());
      if (!p || p->bytes != kPredicate) t_.fail("a guard that is no predicate");
      ins.guard = p->number;
    }
    Statement s;
    s.line = ins.line;
    s.opcode = t_.take();
    s.used_bytes = used_bytes_;
    used_bytes_ = 0xffff;
    for (size_t from = 0; from <= s.opcode.size();) {
      const size_t to = std::min(s.opcode.find('.', from), s.opcode.size());
      s.words.push_back(s.opcode.substr(from, to - from));
      from = to + 1;
    }
    ins.name = name_of(s.opcode);
    if (s.words[0] == "call") return call(ins);
    if (!t_.is(";")) {
      do {
        s.operands.push_back(operand());
      } while (t_.accept(","));
    }
    t_.expect(";");
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
    const std::string_view callee = t_.take();
    const auto body = std::find_if(d_.bodies.begin(), d_.bodies.end(), [&](const Body& b) { return b.name == callee; });
    if (body == d_.bodies.end() || body->entry) t_.fail("a call of " + std::string(callee) + ", which is not here");
    size_t k = 0;
    if (t_.accept(",")) {
      t_.expect("(");
      for (; !t_.accept(")"); t_.accept(",")) {
        Local* local = find_param(t_.take());
        if (!local || k >= body->args.size()) t_.fail("an argument that the function does not have");
        for (size_t store : local->stores) draft_.code[store].offset += body->args[k].offset;
        local->stores.clear();
        ++k;
      }
    }
    if (k != body->args.size()) t_.fail("a call with " + std::to_string(k) + " arguments");
    t_.expect(";");
    ins.run = do_call;
    ins.kind = Kind::kCollective;
    calls_.push_back({d_.program->code.size() + draft_.code.size(), std::string(callee)});
    draft_.code.push_back(ins);
  }
  const char* name_of(std::string_view opcode) {
    return opcodes_->try_emplace(std::string(opcode), 0).first->first.c_str();
  }

  // ---- Operands
  Operand operand() {
    Operand o = simple_operand();
    if (t_.accept("|")) {  // d|p
      Operand pair;
      pair.type = Operand::kVector;
      pair.parts = {o, simple_operand()};
      return pair;
    }
    return o;
  }
  Operand simple_operand() {
    Operand o;
    if (t_.accept("{")) {
      o.type = Operand::kVector;
      do {
        o.parts.push_back(simple_operand());
      } while (t_.accept(","));
      t_.expect("}");
    } else if (t_.accept("[")) {
      o.type = Operand::kAddress;
      o.parts.push_back(simple_operand());
      o.param = o.parts[0].param;
      if (t_.accept("+")) o.offset = s64(t_.number(t_.take()));
      t_.expect("]");
    } else {
      o.text = t_.take();
      name(o);
    }
    return o;
  }
  void name(Operand& o) {
    const std::string_view t = o.text;
    if (t == "_") {
      o.type = Operand::kSink;
    } else if (const Register* r = find_register(t)) {
      o.type = Operand::kRegister;
      o.reg = r->number;
      o.bytes = r->bytes;
    } else if (std::isdigit(u8(t[0])) || t[0] == '-') {
      o.type = Operand::kNumber;
      o.value = t_.number(t);
    } else if (const auto s = d_.symbols.find(t); s != d_.symbols.end()) {
      o.type = Operand::kNumber;
      o.value = s->second;
    } else if (t[0] == '%') {
      o.type = Operand::kSpecial;
    } else {
      const auto& params = body_->kernel.params;
      for (size_t k = 0; k < params.size(); ++k)
        if (params[k].name == t) {
          o.type = Operand::kNumber;
          o.param = !body_->entry;
          o.value = body_->entry ? params[k].offset : body_->args[k].offset;
        }
    }
  }

  void link() {
    for (auto& [index, callee] : calls_)
      for (const Function& f : d_.program->functions)
        if (f.name == callee) d_.program->code[index].target = f.begin;
    mark_lines(*d_.program);
    d_.module->storage = std::make_shared<Keep>(Keep{std::move(d_.storage), opcodes_});
    d_.program->files = d_.module->files;
    d_.program->variables = d_.module->variables;
    for (size_t k = 0; k < d_.module->kernels.size(); ++k) {
      d_.program->entries.push_back({entries_[k].pc, entries_[k].row_bytes});
      d_.module->kernels[k].program = d_.program;
      d_.module->kernels[k].index = u32(k);
    }
  }

  struct Keep {
    std::vector<std::shared_ptr<void>> storage;
    std::shared_ptr<void> opcodes;
  };
  Tokens t_;
  Declared d_;
  std::shared_ptr<std::map<std::string, int>> opcodes_ = std::make_shared<std::map<std::string, int>>();
  u32 rows_ = 0;
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
