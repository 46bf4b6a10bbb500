package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"watershed.dev/test/harness"
)

// auditIDs is the prefix of the audit IDs of the test's requests.
const auditIDs = "differential-"

// everything is an audit policy that records all requests at all stages.
const everything = `apiVersion: audit.k8s.io/v1
kind: Policy
rules:
- level: RequestResponse
`

// someOfIt is an audit policy with rules of every kind.
const someOfIt = `apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [ResponseStarted]
rules:
- {level: None, users: [nobody]}
- {level: None, nonResourceURLs: ["/healthz*", "/version"]}
- {level: Metadata, nonResourceURLs: ["*"], omitStages: [RequestReceived]}
- {level: Metadata, resources: [{group: "", resources: [secrets]}, {group: "", resources: [serviceaccounts/token]}]}
- {level: Request, verbs: [create, update, patch], resources: [{group: apps}], omitManagedFields: true}
- {level: None, verbs: [get], namespaces: [diff],
   resources: [{group: "", resources: [configmaps], resourceNames: [cm]}]}
- {level: RequestResponse, userGroups: ["system:serviceaccounts"]}
- {level: RequestResponse, verbs: [list, delete], omitManagedFields: true}
- {level: RequestResponse, resources: [{group: "", resources: ["pods/*", "*/status"]}]}
- {level: RequestResponse, resources: [{group: diff.example.com}], omitManagedFields: true}
- {level: Metadata}
`

// audits compares the records of the same requests in both servers' audit logs.
func (x *axes) audits() {
	x.configuration("audit of everything, to a file", harness.Twins, func(a *axis, dir string, _ *web) []string {
		write(a.t, filepath.Join(dir, "tokens.csv"), "secret-of-alice,alice,1,\"readers\"\n")
		return append(a.auditFlags(dir, everything), "--token-auth-file="+filepath.Join(dir, "tokens.csv"))
	}, func(a *axis, p *pair, _ *web, dir string) {
		a.audited(p, func(s *side) []fields { return a.recordsOf(auditLog(dir, s.name)) })
	})
	posted := &posts{}
	x.configuration("audit by rules, to a webhook", harness.Twins, func(a *axis, dir string, w *web) []string {
		write(a.t, filepath.Join(dir, "tokens.csv"), "secret-of-alice,alice,1,\"readers\"\n")
		write(a.t, filepath.Join(dir, "audit.yaml"), someOfIt)
		for _, name := range []string{"kube-apiserver", "watershed"} {
			w.HandleFunc("/audit/"+name, posted.take(name))
			a.webhookKubeconfig(dir, "audit-"+name, w, "/audit/"+name)
		}
		return []string{"--audit-policy-file=" + filepath.Join(dir, "audit.yaml"),
			"--audit-webhook-config-file=" + filepath.Join(dir, "audit-"+harness.Side),
			"--audit-webhook-batch-max-size=1", "--audit-webhook-batch-throttle-enable=false",
			"--audit-webhook-batch-buffer-size=100000", "--audit-webhook-initial-backoff=10ms",
			"--token-auth-file=" + filepath.Join(dir, "tokens.csv")}
	}, func(a *axis, p *pair, _ *web, _ string) {
		a.audited(p, func(s *side) []fields { return posted.recordsOf(s.name) })
	})
}

// auditFlags return flags that make each server write its own audit log by a policy.
func (a *axis) auditFlags(dir, policy string) []string {
	write(a.t, filepath.Join(dir, "audit.yaml"), policy)
	return []string{"--audit-policy-file=" + filepath.Join(dir, "audit.yaml"),
		"--audit-log-path=" + auditLog(dir, harness.Side), "--audit-log-maxsize=1000"}
}

func auditLog(dir, side string) string { return filepath.Join(dir, side, "audit.log") }

// posts are the events that each server sent to the audit webhook.
type posts struct {
	mu  sync.Mutex
	all map[string][]fields
}

func (p *posts) take(name string) http.HandlerFunc {
	return func(_ http.ResponseWriter, req *http.Request) {
		var list struct{ Items []json.RawMessage }
		_ = json.NewDecoder(req.Body).Decode(&list)
		p.mu.Lock()
		defer p.mu.Unlock()
		if p.all == nil {
			p.all = map[string][]fields{}
		}
		for _, e := range list.Items {
			p.all[name] = append(p.all[name], fromJSON(e).(fields))
		}
	}
}

func (p *posts) recordsOf(name string) []fields {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.all[name])
}

func (a *axis) recordsOf(path string) (all []fields) {
	data, err := os.ReadFile(path)
	if err != nil {
		a.t.Fatal(err)
	}
	lines := bufio.NewScanner(bytes.NewReader(data))
	lines.Buffer(nil, 64<<20)
	for lines.Scan() {
		record, ok := fromJSON(lines.Bytes()).(fields)
		if !ok {
			a.t.Errorf("a line is no record: %.300s", lines.Bytes())
			continue
		}
		all = append(all, record)
	}
	return all
}

// audited sends the corpus and compares its audit records.
func (a *axis) audited(p *pair, records func(*side) []fields) {
	answers := a.report
	p.report, p.audited = newReport(slices.Concat(knownOfAudit, known, knownByConfiguration)), true
	p.report.listed = answers.listed
	d := p.discover()
	all := d.valid()
	p.create(all)
	for _, s := range []*side{p.theirs, p.ours} {
		withoutRepairs(a.t, s.server)
	}
	p.verbs(all)
	p.paths()
	p.identities()
	p.walk(all, 400, rand.New(rand.NewPCG(13, 1)))
	p.remove(all)
	if n := len(p.report.unexplained); n > 0 {
		a.t.Errorf("%d answers differ", n)
		p.report.write(a.t.TempDir())
	}
	p.report = answers
	a.compareAudits(p, records)
}

// compareAudits reports the differences between the audit records of the same requests.
func (a *axis) compareAudits(p *pair, records func(*side) []fields) {
	theirs, ours := a.settled(p.theirs, records), a.settled(p.ours, records)
	listed := p.report.known
	p.report.known = slices.Concat(knownOfAudit, known, listed)
	for id, r := range p.sent {
		p.compareRecords(r, theirs[id], ours[id])
	}
	p.report.known = listed
	fmt.Printf("%s: %d requests audited, %d not\n", a.t.Name(), len(theirs), len(p.sent)-len(theirs))
}

// anonymousClient presents no certificate.
var anonymousClient = &certificate{name: "none"}

// settled returns a side's records by audit ID, once their number is stable.
func (a *axis) settled(s *side, records func(*side) []fields) map[string][]fields {
	var all map[string][]fields
	count := func() (n int) {
		for _, group := range all {
			n += len(group)
		}
		return n
	}
	harness.Eventually(a.t, harness.Soon, func() error {
		before := count()
		time.Sleep(time.Second)
		if all = byID(records(s)); count() == before {
			return nil
		}
		return fmt.Errorf("%s is still writing: %d records", s.name, count())
	})
	return all
}

// identities sends requests with different users: impersonated, with a token, with a wrong token, anonymous.
func (p *pair) identities() {
	const path = "/api/v1/namespaces/" + namespace + "/configmaps"
	for about, header := range map[string]map[string]string{
		"a token":       {"Authorization": "Bearer secret-of-alice"},
		"a wrong token": {"Authorization": "Bearer wrong"},
		"impersonation": {"Impersonate-User": "bob", "Impersonate-Group": "g", "Impersonate-Uid": "7",
			"Impersonate-Extra-Scopes": "a"},
		"impersonation of an account": {"Impersonate-User": "system:serviceaccount:default:default"},
		"a long agent":                {"User-Agent": strings.Repeat("agent ", 400)},
		"forwarded":                   {"X-Forwarded-For": "192.0.2.7, 10.0.0.1", "X-Real-Ip": "192.0.2.8"},
	} {
		var as *certificate
		if header["Authorization"] != "" {
			as = anonymousClient
		}
		for _, method := range []string{"GET", "POST", "DELETE"} {
			p.ask(&request{
				method: method, path: path, header: merged(jsonBody, header), about: about,
				body: []byte(`{"apiVersion":"v1","kind":"ConfigMap","metadata":{"generateName":"who-"}}`),
				as:   as,
			})
		}
	}
	for _, query := range []string{"?watch=1&timeoutSeconds=1", "?watch=1&timeoutSeconds=1&resourceVersion=1",
		"?watch=1&resourceVersion=odd", "?watch=1&timeoutSeconds=1&sendInitialEvents=true"} {
		p.ask(&request{method: "GET", path: "/api/v1/namespaces/none/configmaps" + query, about: "a watch"})
	}
}

// byID returns the records of the test's requests by audit ID, in the order of the log.
func byID(all []fields) map[string][]fields {
	out := map[string][]fields{}
	for _, r := range all {
		if id, _ := r["auditID"].(string); strings.HasPrefix(id, auditIDs) {
			out[id] = append(out[id], r)
		}
	}
	return out
}

// compareRecords reports the differences between one request's records, as it does for responses.
func (p *pair) compareRecords(r *request, theirs, ours []fields) {
	if r.repeated {
		theirs, ours = lastOfEach(theirs), lastOfEach(ours)
	}
	p.report.compare(r, asAnswer(theirs), asAnswer(ours))
}

// lastOfEach returns the last record of each stage.
func lastOfEach(records []fields) (last []fields) {
	for i, r := range records {
		if !slices.ContainsFunc(records[i+1:], func(later fields) bool { return later["stage"] == r["stage"] }) {
			last = append(last, r)
		}
	}
	return last
}

// stageOf returns the index of a record's stage in the order of stages.
func stageOf(record any) int {
	stage, _ := record.(fields)["stage"].(string)
	return slices.Index([]string{"RequestReceived", "ResponseStarted", "ResponseComplete", "Panic"}, stage)
}

func asAnswer(records []fields) answer {
	var stages []any
	code := 0
	for _, r := range records {
		r = maps.Clone(r)
		for _, k := range []string{"requestReceivedTimestamp", "stageTimestamp"} {
			if r[k] != nil {
				r[k] = "TIME"
			}
		}
		if notes, ok := r["annotations"].(fields); ok {
			for k := range notes {
				if strings.HasPrefix(k, "apiserver.latency.k8s.io/") {
					delete(notes, k)
				}
			}
		}
		if status, ok := r["responseStatus"].(fields); ok {
			_, _ = fmt.Sscan(fmt.Sprint(status["code"]), &code)
		}
		stages = append(stages, r)
	}
	slices.SortStableFunc(stages, func(a, b any) int { return stageOf(a) - stageOf(b) }) // batches may be reordered
	body, _ := json.Marshal(stages)
	return answer{code: code, body: body, header: http.Header{"Content-Type": {"application/json"}}}
}
