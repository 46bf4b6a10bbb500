package admission

import (
	"compress/gzip"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

// A webhook response of more than 16 MB after decompression is a failure, and the failurePolicy applies.
func TestAWebhooksResponseIsBounded(t *testing.T) {
	hook := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		var review struct{ Request struct{ UID string } }
		if err := json.NewDecoder(req.Body).Decode(&review); err != nil {
			t.Error(err)
		}
		w.Header().Set("Content-Encoding", "gzip")
		w.Header().Set("Content-Type", "application/json")
		z := gzip.NewWriter(w)
		defer z.Close()
		fmt.Fprintf(z, `{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview","response":{"uid":%q,`+
			`"allowed":true}}%s`, review.Request.UID, strings.Repeat(" ", 17<<20))
	}))
	t.Cleanup(hook.Close)
	ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: hook.Certificate().Raw})
	configuration := func(name, policy string) string {
		return fmt.Sprintf(`{"metadata":{"name":%[1]q},"webhooks":[{"name":"%[1]s.example.com","sideEffects":"None",`+
			`"admissionReviewVersions":["v1"],"failurePolicy":%[2]q,"matchPolicy":"Equivalent","timeoutSeconds":10,`+
			`"namespaceSelector":{"matchLabels":{"kubernetes.io/metadata.name":"x"}},"objectSelector":`+
			`{"matchLabels":{"policy":%[2]q}},"clientConfig":{"url":"%[3]s/hook","caBundle":%[4]q},"rules":`+
			`[{"scope":"*","operations":["CREATE"],"apiGroups":[""],"apiVersions":["v1"],`+
			`"resources":["configmaps"]}]}]}`,
			name, policy, hook.URL, base64.StdEncoding.EncodeToString(ca))
	}
	const path = "/apis/admissionregistration.k8s.io/v1/"
	for _, kind := range []string{"mutatingwebhookconfigurations", "validatingwebhookconfigurations"} {
		a := chain(t, cluster{path + kind: {configuration("strict", "Fail"), configuration("lax", "Ignore")}})
		review := func(policy string) error {
			v := creationOf("ConfigMap", "configmaps", "x", `{"apiVersion":"v1","kind":"ConfigMap","metadata":`+
				`{"name":"n","namespace":"x","labels":{"policy":"`+policy+`"}}}`)
			_, err := a.Admit(t.Context(), v)
			if err == nil {
				_, err = a.Validate(t.Context(), v)
			}
			return err
		}
		if err := review("Ignore"); err != nil {
			t.Errorf("%s with failurePolicy Ignore: %v", kind, err)
		}
		err := review("Fail")
		if err == nil || !strings.Contains(err.Error(), `"strict.example.com"`) ||
			!strings.Contains(err.Error(), "/hook answers with more than 16777216 bytes") {
			t.Errorf("%s with failurePolicy Fail: %v", kind, err)
		}
	}
}
