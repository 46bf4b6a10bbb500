package main

import (
	"bytes"
	"crypto/tls"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"sync"
	"sync/atomic"
	"time"
)

// admitted measures the cost of a create with token authentication, RBAC and an admission webhook.
func admitted(s *server) map[string]float64 {
	const creates, parallel = 1000, 4
	hook := newHook()
	defer hook.Close()
	name := fmt.Sprint("admitted", serial.Add(1))
	defer s.do("DELETE", "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations/"+name, "", nil, 200)
	token := s.robot(name, hook)
	client := &http.Client{Transport: &http.Transport{
		TLSClientConfig:     &tls.Config{InsecureSkipVerify: true}, // the token identifies the user
		MaxIdleConnsPerHost: parallel,
	}}
	create := func(i int) int {
		req, err := http.NewRequest("POST", s.url+"/api/v1/namespaces/"+name+"/configmaps",
			bytes.NewReader(fmt.Appendf(nil,
				`{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"c%d"},"data":{"k":"v"}}`, i)))
		check(err)
		req.Header.Set("Authorization", "Bearer "+token)
		req.Header.Set("Content-Type", "application/json")
		resp, err := client.Do(req)
		check(err)
		defer resp.Body.Close()
		_, err = io.Copy(io.Discard, resp.Body)
		check(err)
		return resp.StatusCode
	}
	for n := 0; create(creates+n) != 201 || hook.calls.Load() == 0; n++ { // until policy and webhook are in force
		if n > 200 {
			log.Fatalf("%s: the token may not create, or the webhook is not called", s.name)
		}
		time.Sleep(50 * time.Millisecond)
	}
	callsBefore, before := hook.calls.Load(), s.begin()
	took := make([]time.Duration, creates)
	var next atomic.Int64
	var wg sync.WaitGroup
	for range parallel {
		wg.Go(func() {
			for i := int(next.Add(1)) - 1; i < creates; i = int(next.Add(1)) - 1 {
				began := time.Now()
				if code := create(i); code != 201 {
					log.Fatalf("%s: %d", s.name, code)
				}
				took[i] = time.Since(began)
			}
		})
	}
	wg.Wait()
	cpu := (s.cpu() - before) * 1000 / creates
	if n := hook.calls.Load() - callsBefore; n != creates {
		log.Fatalf("%s called the webhook %d times for %d creates", s.name, n, creates)
	}
	const row = "create by a token's user, through a webhook"
	return map[string]float64{
		row + " (CPU ms)":  cpu,
		row + ": p50 (ms)": percentile(took, 50),
		row + ": p99 (ms)": percentile(took, 99),
	}
}

// webhook is an admission webhook that allows every request.
type webhook struct {
	*httptest.Server
	calls atomic.Int64
}

func newHook() *webhook {
	h := &webhook{}
	h.Server = httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		var r struct {
			APIVersion, Kind string
			Request          struct{ UID string }
		}
		check(json.NewDecoder(req.Body).Decode(&r))
		h.calls.Add(1)
		w.Header().Set("Content-Type", "application/json")
		_, _ = fmt.Fprintf(w, `{"apiVersion":%q,"kind":%q,"response":{"uid":%q,"allowed":true}}`, r.APIVersion, r.Kind,
			r.Request.UID)
	}))
	return h
}

// robot creates a namespace and a service account that may create config maps, with a webhook for each of them. It
// returns the account's token.
func (s *server) robot(name string, hook *webhook) string {
	token := s.account(name, `{"apiGroups":[""],"resources":["configmaps"],"verbs":["create","list"]}`)
	ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: hook.Certificate().Raw})
	s.do("POST", "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations", "",
		fmt.Appendf(nil,
			`{"apiVersion":"admissionregistration.k8s.io/v1","kind":"ValidatingWebhookConfiguration",`+
				`"metadata":{"name":%q},"webhooks":[{"name":"all.bench.example","clientConfig":{"url":%q,`+
				`"caBundle":%q},"rules":[{"apiGroups":[""],"apiVersions":["v1"],"resources":["configmaps"],`+
				`"operations":["CREATE"]}],"namespaceSelector":{"matchLabels":{"kubernetes.io/metadata.name":%q}},`+
				`"sideEffects":"None","admissionReviewVersions":["v1"],"failurePolicy":"Fail"}]}`,
			name, hook.URL+"/all", base64.StdEncoding.EncodeToString(ca), name), 201)
	return token
}
