package main

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
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
		for client, o := range s.measured(others) {
			row := fmt.Sprintf("%s, %s a loud tenant: ", client, when)
			out[row+"p50 (ms)"], out[row+"p99 (ms)"] = ms(o.percentile(50)), ms(o.percentile(99))
			out[row+"refused or late (%)"] = 100 * float64(o.failed) / float64(max(1, len(o.took)))
		}
	}
	report("without")
	began := time.Now()
	stop := s.startLoudTenant(name, loud)
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

// loudTenantCommand is the argument that makes this program the tenant. The tenant is a separate process, because its
// goroutines would delay the other clients' requests.
const loudTenantCommand = "loud-tenant"

// tenantCPU is the metric of the tenant's own CPU time, because the tenant shares the machine with the servers.
const tenantCPU = "ms of its own CPU"

// startLoudTenant starts the tenant's process. stop ends it and returns its counters.
func (s *server) startLoudTenant(name, token string) (stop func() map[string]int64) {
	self, err := os.Executable()
	check(err)
	cmd := exec.Command(self, loudTenantCommand, s.url, name, token)
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	check(err)
	var answer bytes.Buffer
	cmd.Stdout = &answer
	check(cmd.Start())
	return func() map[string]int64 {
		check(in.Close())
		check(cmd.Wait())
		got := map[string]int64{}
		check(json.Unmarshal(answer.Bytes(), &got))
		got[tenantCPU] = (cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime()).Milliseconds()
		return got
	}
}

// runLoudTenant is the tenant's process. It runs until its standard input ends.
func runLoudTenant(args []string) {
	ctx, cancel := context.WithCancel(context.Background())
	t := &loudTenant{url: args[0], path: args[0] + "/api/v1/namespaces/" + args[1] + "/configmaps", token: args[2]}
	t.begin(ctx, args[1])
	_, _ = io.Copy(io.Discard, os.Stdin)
	cancel()
	t.done.Wait()
	check(json.NewEncoder(os.Stdout).Encode(map[string]int64{
		"lists answered": t.lists.Load(), "lists refused": t.refused.Load(), "events of its watches": t.events.Load(),
		"changes made": t.changes.Load(), "watches begun": t.watches.Load(),
	}))
}

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
}

// percentile returns the p-th percentile of the sorted latencies.
func (o *outcome) percentile(p int) time.Duration {
	if len(o.took) == 0 {
		return 0
	}
	return o.took[(len(o.took)-1)*p/100]
}

// requestTimeout is the limit above which a response is late: the time for a kubelet or a leader to renew its Lease.
const requestTimeout = 5 * time.Second

// measured sends the requests of the others, each at its own rate.
func (s *server) measured(others map[string]other) map[string]*outcome {
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
			for i, began := 0, time.Now(); time.Since(began) < beside; i++ {
				<-tick.C
				if o.single {
					inFlight.Wait()
				}
				inFlight.Go(func() {
					ctx, cancel := context.WithTimeout(context.Background(), requestTimeout)
					defer cancel()
					at := time.Now()
					resp, err := o.ask(ctx, i)
					if err == nil {
						_, err = io.Copy(io.Discard, resp.Body)
						resp.Body.Close()
					}
					mu.Lock()
					defer mu.Unlock()
					got.took = append(got.took, time.Since(at))
					if err != nil || resp.StatusCode >= 400 {
						got.failed++
					}
				})
			}
			inFlight.Wait()
			slices.Sort(got.took)
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
			`{"apiVersion":"coordination.k8s.io/v1","kind":"Lease","metadata":{"name":%q},"spec":{"holderIdentity":"x"}}`,
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
	return map[string]other{
		"kubelets": {every: 50 * time.Millisecond, ask: func(ctx context.Context, i int) (*http.Response, error) {
			node := fmt.Sprintf("%s-n%d", name, i%nodes)
			return send(ctx, "PATCH", beats[i%nodes], renewal(), "application/merge-patch+json", map[string]string{
				"Impersonate-User": "system:node:" + node, "Impersonate-Group": "system:nodes",
			})
		}},
		"an election": {every: 200 * time.Millisecond, single: true, ask: func(ctx context.Context, _ int) (*http.Response, error) {
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
		}},
		"another tenant": {every: 100 * time.Millisecond, ask: func(ctx context.Context, i int) (*http.Response, error) {
			req, err := http.NewRequestWithContext(
				ctx,
				"GET",
				s.url+"/api/v1/namespaces/"+name+"-quiet/configmaps",
				nil,
			)
			check(err)
			if i%2 == 1 {
				req, err = http.NewRequestWithContext(ctx, "POST", req.URL.String(), strings.NewReader(
					`{"apiVersion":"v1","kind":"ConfigMap","metadata":{"generateName":"c"},"data":{"k":"v"}}`))
				check(err)
				req.Header.Set("Content-Type", "application/json")
			}
			return own(req)
		}},
	}
}

// loudTenant is the tenant's load.
type loudTenant struct {
	url, path, token                         string
	lists, refused, events, changes, watches atomic.Int64

	done sync.WaitGroup
}

func (l *loudTenant) begin(ctx context.Context, name string) {
	path, token := l.path, l.token
	send := func(do func(*http.Request) (*http.Response, error), method, path, body, contentType string) (int, error) {
		req, err := http.NewRequestWithContext(ctx, method, path, strings.NewReader(body))
		check(err)
		req.Header.Set("Content-Type", contentType)
		resp, err := do(req)
		if err != nil {
			return 0, err
		}
		defer resp.Body.Close()
		_, err = io.Copy(io.Discard, resp.Body)
		return resp.StatusCode, err
	}
	for range 20 { // each connection has 250 watches
		do := bearer(token)
		for range tenantWatches / 20 {
			l.done.Go(func() { l.watch(ctx, do) })
		}
	}
	lister := bearer(token)
	for range tenantListers {
		l.done.Go(func() {
			tick := time.NewTicker(time.Second * tenantListers / tenantLists)
			defer tick.Stop()
			for ctx.Err() == nil {
				<-tick.C
				switch code, err := send(lister, "GET", path, "", ""); {
				case err == nil && code == http.StatusOK:
					l.lists.Add(1)
				case err == nil && code == http.StatusTooManyRequests:
					l.refused.Add(1)
				}
			}
		})
	}
	l.done.Go(func() {
		for i := 0; ctx.Err() == nil; i++ {
			change := fmt.Sprintf(`{"data":{"n":"%d"}}`, i)
			if code, _ := send(lister, "PATCH", path+"/c0", change, "application/merge-patch+json"); code == http.StatusOK {
				l.changes.Add(1)
			}
			time.Sleep(50 * time.Millisecond)
		}
	})
	at, err := url.Parse(l.url)
	check(err)
	for range tenantBodies {
		l.done.Go(func() {
			conn, err := tls.DialWithDialer(&net.Dialer{Timeout: 10 * time.Second}, "tcp", at.Host,
				&tls.Config{InsecureSkipVerify: true, NextProtos: []string{"http/1.1"}})
			if err != nil {
				return
			}
			defer conn.Close()
			_, _ = fmt.Fprintf(
				conn,
				"POST /api/v1/namespaces/%s/configmaps HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\n"+
					"Content-Type: application/json\r\nContent-Length: 1000000\r\n\r\n",
				name,
				token,
			)
			for ctx.Err() == nil {
				if _, err := conn.Write([]byte(" ")); err != nil {
					return
				}
				time.Sleep(100 * time.Millisecond)
			}
		})
	}
}

// watch keeps a watch of the object open, and counts its events.
func (l *loudTenant) watch(ctx context.Context, do func(*http.Request) (*http.Response, error)) {
	for ctx.Err() == nil {
		req, err := http.NewRequestWithContext(ctx, "GET", l.path+"?watch=1&fieldSelector=metadata.name%3Dc0", nil)
		check(err)
		resp, err := do(req)
		if err != nil {
			time.Sleep(time.Second)
			continue
		}
		if resp.StatusCode == http.StatusOK {
			l.watches.Add(1)
			for lines := bufio.NewReader(resp.Body); err == nil; {
				if _, err = lines.ReadSlice('\n'); err == nil {
					l.events.Add(1)
				} else if errors.Is(err, bufio.ErrBufferFull) {
					err = nil
				}
			}
		}
		resp.Body.Close()
		time.Sleep(time.Second) // like a client's backoff
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
