package main

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"net/http"
	"strings"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

const (
	// tenantObjects is the number of objects that the loud tenant lists, of tenantBytes each.
	tenantObjects, tenantBytes = 500, 8 << 10
	// tenantListers list them, together at most tenantLists times a second.
	tenantListers, tenantLists = 50, 100
	tenantWatches              = 5000
	tenantBodies               = 50
	// beside is how long the other clients are measured, without the tenant and beside it.
	beside = 20 * time.Second
)

// tenant measures the latency and the failures of other clients beside a loud tenant. The tenant lists all its objects
// 100 times a second. It watches one object 5,000 times and changes it 20 times a second. It also sends 50 request
// bodies byte by byte.
func tenant(s *server) map[string]float64 {
	name := fmt.Sprint("tenant", serial.Add(1))
	loud := s.account(name, `{"apiGroups":[""],"resources":["configmaps"],"verbs":["*"]}`)
	quiet := s.account(name+"-quiet", `{"apiGroups":[""],"resources":["configmaps"],"verbs":["*"]}`)
	filler := strings.Repeat("x", tenantBytes)
	for i := range tenantObjects {
		s.do(
			"POST",
			"/api/v1/namespaces/"+name+"/configmaps",
			"",
			fmt.Appendf(
				nil,
				`{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"c%d"},"data":{"k":%q}}`,
				i,
				filler,
			),
			201,
		)
	}
	others := s.others(name, quiet)
	defer s.do(
		"DELETE",
		"/apis/coordination.k8s.io/v1/namespaces/kube-system/leases/kube-controller-manager",
		"",
		nil,
		200,
	)
	out := map[string]float64{}
	report := func(when string) {
		ctx, cancel := context.WithTimeout(context.Background(), beside)
		defer cancel()
		for client, o := range s.measured(ctx, others) {
			row := fmt.Sprintf("%s, %s a loud tenant: ", client, when)
			out[row+"p50 (ms)"], out[row+"p99 (ms)"] = percentile(o.took, 50), percentile(o.took, 99)
			for reason, n := range o.reasons {
				log.Printf("%s%d requests failed: %s", row, n, reason)
			}
			out[row+"refused or late (%)"] = 100 * float64(o.failed) / float64(max(1, len(o.took)))
		}
	}
	report("without")
	began := time.Now()
	stop := startChild("loud-tenant", s.url, name, loud)
	time.Sleep(warmUp)
	report("beside")
	took := time.Since(began)
	for metric, n := range stop() {
		out["the loud tenant: "+metric+" a second"] = float64(n) / took.Seconds()
	}
	return out
}

// warmUp is how long the tenant is loud before the measurement. Its watches are open by then.
const warmUp = 10 * time.Second

// other is a client whose requests are measured.
type other struct {
	every time.Duration
	// single allows one request at a time. The next one is late if a response takes longer than every.
	single bool

	ask func(ctx context.Context, i int) (*http.Response, error)
}

type outcome struct {
	took   []time.Duration
	failed int
	// reasons counts the reasons of failures.
	reasons map[string]int
}

// fail counts a failed request by its reason. body begins with the body of the response.
func (o *outcome) fail(err error, resp *http.Response, body []byte) {
	o.failed++
	if o.reasons == nil {
		o.reasons = map[string]int{}
	}
	if err == nil {
		var status metav1.Status
		_ = json.Unmarshal(body, &status)
		err = fmt.Errorf("%s: %s", resp.Status, status.Message)
	}
	o.reasons[err.Error()]++
}

// maxMessage is the number of bytes of a response in which fail looks for a message.
const maxMessage = 4 << 10

// requestTimeout is the limit above which a response is late: the time for a kubelet or a leader to renew its Lease.
const requestTimeout = 5 * time.Second

// measured sends the requests of the others, each at its own rate, until ctx ends.
func (s *server) measured(ctx context.Context, others map[string]other) map[string]*outcome {
	out := map[string]*outcome{}
	var wg sync.WaitGroup
	for client, o := range others {
		got := &outcome{}
		out[client] = got
		wg.Go(func() {
			var mu sync.Mutex
			var inFlight sync.WaitGroup
			tick := time.NewTicker(o.every)
			defer tick.Stop()
			for i := 0; ctx.Err() == nil; i++ {
				<-tick.C
				if o.single {
					inFlight.Wait()
				}
				inFlight.Go(func() {
					ctx, cancel := context.WithTimeout(context.Background(), requestTimeout)
					defer cancel()
					at := time.Now()
					resp, err := o.ask(ctx, i)
					var body []byte
					if err == nil {
						body, _ = io.ReadAll(io.LimitReader(resp.Body, maxMessage))
						_, err = io.Copy(io.Discard, resp.Body)
						resp.Body.Close()
					}
					mu.Lock()
					defer mu.Unlock()
					got.took = append(got.took, time.Since(at))
					if err != nil || resp.StatusCode >= 400 {
						got.fail(err, resp, body)
					}
				})
			}
			inFlight.Wait()
		})
	}
	wg.Wait()
	return out
}

const renewTime = "2006-01-02T15:04:05.000000Z"

// others returns the other clients: heartbeats of 20 kubelets (at ten times their rate), a leader election and another
// tenant.
func (s *server) others(name, token string) map[string]other {
	lease := func(ns, name string) string {
		path := "/apis/coordination.k8s.io/v1/namespaces/" + ns + "/leases"
		s.do("POST", path, "", fmt.Appendf(
			nil,
			`{"apiVersion":"coordination.k8s.io/v1","kind":"Lease","metadata":{"name":%q},`+
				`"spec":{"holderIdentity":"x"}}`,
			name,
		),
			201)
		return path + "/" + name
	}
	const nodes = 20
	var beats []string
	for i := range nodes {
		node := fmt.Sprintf("%s-n%d", name, i)
		beats = append(beats, lease("kube-node-lease", node))
	}
	election := lease("kube-system", "kube-controller-manager") // its role names this Lease
	renewal := func() string {
		return fmt.Sprintf(`{"spec":{"renewTime":%q}}`, time.Now().UTC().Format(renewTime))
	}
	send := func(ctx context.Context, method, path, body, contentType string,
		header map[string]string) (*http.Response, error) {
		req, err := http.NewRequestWithContext(ctx, method, s.url+path, strings.NewReader(body))
		check(err)
		req.Header.Set("Content-Type", contentType)
		for k, v := range header {
			req.Header.Set(k, v)
		}
		return s.client.Do(req)
	}
	own := bearer(token)
	heartbeat := func(ctx context.Context, i int) (*http.Response, error) {
		node := fmt.Sprintf("%s-n%d", name, i%nodes)
		return send(ctx, "PATCH", beats[i%nodes], renewal(), "application/merge-patch+json", map[string]string{
			"Impersonate-User": "system:node:" + node, "Impersonate-Group": "system:nodes",
		})
	}
	renew := func(ctx context.Context, _ int) (*http.Response, error) {
		// its role allows an update of this Lease, and no patch
		as := map[string]string{"Impersonate-User": "system:kube-controller-manager"}
		resp, err := send(ctx, "GET", election, "", "", as)
		if err != nil || resp.StatusCode != http.StatusOK {
			return resp, err
		}
		var lease map[string]any
		err = json.NewDecoder(resp.Body).Decode(&lease)
		resp.Body.Close()
		if err != nil {
			return nil, err
		}
		lease["spec"].(map[string]any)["renewTime"] = time.Now().UTC().Format(renewTime)
		body, err := json.Marshal(lease)
		check(err)
		return send(ctx, "PUT", election, string(body), "application/json", as)
	}
	listOrCreate := func(ctx context.Context, i int) (*http.Response, error) {
		path := s.url + "/api/v1/namespaces/" + name + "-quiet/configmaps"
		req, err := http.NewRequestWithContext(ctx, "GET", path, nil)
		check(err)
		if i%2 == 1 {
			req, err = http.NewRequestWithContext(ctx, "POST", path, strings.NewReader(
				`{"apiVersion":"v1","kind":"ConfigMap","metadata":{"generateName":"c"},"data":{"k":"v"}}`))
			check(err)
			req.Header.Set("Content-Type", "application/json")
		}
		return own(req)
	}
	return map[string]other{
		"kubelets":       {every: 50 * time.Millisecond, ask: heartbeat},
		"an election":    {every: 200 * time.Millisecond, single: true, ask: renew},
		"another tenant": {every: 100 * time.Millisecond, ask: listOrCreate},
	}
}

// bearer returns a function that sends requests with a token over its own connection.
func bearer(token string) func(*http.Request) (*http.Response, error) {
	c := &http.Client{Transport: &http.Transport{
		TLSClientConfig:   &tls.Config{InsecureSkipVerify: true}, // the token identifies the user
		ForceAttemptHTTP2: true,
	}}
	return func(req *http.Request) (*http.Response, error) {
		req.Header.Set("Authorization", "Bearer "+token)
		return c.Do(req)
	}
}

// account creates a namespace and a service account that a rule grants permissions there. It returns the account's
// token once the permissions are in force.
func (s *server) account(name, rule string) string {
	post := func(path, text string, args ...any) []byte {
		return s.do("POST", path, "", fmt.Appendf(nil, text, args...), 201)
	}
	in := "/api/v1/namespaces/" + name
	post("/api/v1/namespaces", `{"apiVersion":"v1","kind":"Namespace","metadata":{"name":%q}}`, name)
	post(in+"/serviceaccounts", `{"apiVersion":"v1","kind":"ServiceAccount","metadata":{"name":"robot"}}`)
	const rbac = "/apis/rbac.authorization.k8s.io/v1/namespaces/"
	post(rbac+name+"/roles",
		`{"apiVersion":"rbac.authorization.k8s.io/v1","kind":"Role","metadata":{"name":"r"},"rules":[%s]}`, rule)
	post(
		rbac+name+"/rolebindings",
		`{"apiVersion":"rbac.authorization.k8s.io/v1","kind":"RoleBinding","metadata":{"name":"r"},`+
			`"roleRef":{"apiGroup":"rbac.authorization.k8s.io","kind":"Role","name":"r"},`+
			`"subjects":[{"kind":"ServiceAccount","name":"robot","namespace":%q}]}`,
		name,
	)
	var t struct{ Status struct{ Token string } }
	check(json.Unmarshal(post(in+"/serviceaccounts/robot/token",
		`{"apiVersion":"authentication.k8s.io/v1","kind":"TokenRequest","spec":{}}`), &t))
	do := bearer(t.Status.Token)
	for n := 0; ; n++ {
		req, err := http.NewRequest("GET", s.url+in+"/configmaps", nil)
		check(err)
		resp, err := do(req)
		check(err)
		_ = resp.Body.Close()
		if resp.StatusCode == http.StatusOK {
			return t.Status.Token
		}
		if n > 200 {
			log.Fatalf("%s: the account may not list: %d", s.name, resp.StatusCode)
		}
		time.Sleep(50 * time.Millisecond)
	}
}
