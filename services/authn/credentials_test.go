package authn

import (
	"context"
	"crypto/x509"
	"encoding/base64"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/apiserver/pkg/authentication/authenticator"
	"k8s.io/apiserver/pkg/authentication/request/bearertoken"
	"k8s.io/apiserver/pkg/authentication/request/headerrequest"
	"k8s.io/apiserver/pkg/authentication/request/union"
	"k8s.io/apiserver/pkg/authentication/request/websocket"
	"k8s.io/apiserver/pkg/authentication/user"
	kubeoptions "k8s.io/kubernetes/pkg/kubeapiserver/options"

	"watershed.dev/platform/apiclient"
	authnv1 "watershed.dev/proto/watershed/authn/v1"
	commonv1 "watershed.dev/proto/watershed/common/v1"
)

const secret = "SUPERSECRET"

func encoded(token string) string { return base64.RawURLEncoding.EncodeToString([]byte(token)) }

// service returns a service with a token authenticator of each form, and a front proxy for which every client is
// allowed.
func service() *Service {
	tokens := authenticator.TokenFunc(func(_ context.Context, token string) (*authenticator.Response, bool, error) {
		return &authenticator.Response{User: &user.DefaultInfo{
			Name:   "alice",
			Groups: []string{user.AllAuthenticated},
		}}, token == secret, nil
	})
	o := kubeoptions.NewBuiltInAuthenticationOptions().WithAll()
	o.RequestHeader.UsernameHeaders = []string{"X-Remote-User"}
	o.RequestHeader.GroupHeaders = []string{"X-Remote-Group"}
	o.RequestHeader.ExtraHeaderPrefixes = []string{"X-Remote-Extra-"}
	proxy, err := headerrequest.New([]string{"X-Remote-User"}, nil,
		[]string{"X-Remote-Group"}, []string{"X-Remote-Extra-"})
	if err != nil {
		panic(err)
	}
	certificate := authenticator.RequestFunc(func(req *http.Request) (*authenticator.Response, bool, error) {
		return &authenticator.Response{User: &user.DefaultInfo{Name: "certificate"}}, req.TLS == nil &&
			req.Header.Get("X-Certificate") != "", nil
	})
	return &Service{config: &Config{Options: o, CacheTTL: 10 * time.Second}, cluster: &apiclient.Cluster{},
		auth: union.New(certificate, proxy, bearertoken.New(tokens), websocket.NewProtocolAuthenticator(tokens))}
}

func authenticate(t *testing.T, headers map[string][]string) *authnv1.AuthenticateResponse {
	t.Helper()
	r := &authnv1.AuthenticateRequest{Path: "/", Headers: map[string]*commonv1.Values{}}
	for k, v := range headers {
		r.Headers[k] = &commonv1.Values{Values: v}
	}
	resp, err := service().Authenticate(t.Context(), r)
	if err != nil || !resp.Authenticated {
		t.Fatalf("%v: %v %v", headers, resp, err)
	}
	return resp
}

// No credential is forwarded, whichever authenticator accepts the request (S8).
func TestNoCredentialTravelsOn(t *testing.T) {
	bearer := bearerProtocol + encoded(secret)
	for name, headers := range map[string]map[string][]string{
		"bearer":             {"Authorization": {"Bearer " + secret}},
		"bearer, lower case": {"Authorization": {"bearer " + secret}},
		"websocket": {
			"Sec-Websocket-Protocol": {bearer + ", v4.channel.k8s.io"},
			"Connection":             {"Upgrade"},
			"Upgrade":                {"websocket"},
		},
		"websocket, many values": {
			"Sec-Websocket-Protocol": {"v5.channel.k8s.io", bearer, "v4.channel.k8s.io"},
			"Connection":             {"Upgrade"},
			"Upgrade":                {"websocket"},
		},
		"certificate beside bearer": {"X-Certificate": {"x"}, "Authorization": {"Bearer " + secret}},
		"certificate beside socket": {
			"X-Certificate":          {"x"},
			"Sec-Websocket-Protocol": {bearer + ",v4.channel.k8s.io"},
		},
		"certificate, socket alone": {"X-Certificate": {"x"}, "Sec-Websocket-Protocol": {bearer}},
		"front proxy": {
			"X-Remote-User":         {secret},
			"X-Remote-Group":        {secret},
			"X-Remote-Extra-Scopes": {secret},
		},
		"front proxy beside a token": {
			"X-Remote-User":    {"bob"},
			"Authorization":    {"Bearer " + secret},
			"X-Remote-Extra-A": {secret},
		},
	} {
		t.Run(name, func(t *testing.T) {
			resp := authenticate(t, headers)
			for header, values := range headers {
				left := values
				if r, ok := resp.ReplacedHeaders[header]; ok {
					left = r.Values
				}
				for _, v := range left {
					if strings.Contains(v, secret) || strings.Contains(v, encoded(secret)) {
						t.Errorf("%s: %q is forwarded", header, v)
					}
				}
			}
		})
	}
	resp := authenticate(t, map[string][]string{
		"Sec-Websocket-Protocol": {"v5.channel.k8s.io", bearer, "v4.channel.k8s.io"},
		"Connection":             {"Upgrade"},
		"Upgrade":                {"websocket"},
	})
	if got := fmt.Sprint(resp.ReplacedHeaders["Sec-Websocket-Protocol"].GetValues()); !strings.Contains(got,
		"v5.channel.k8s.io") || !strings.Contains(got, "v4.channel.k8s.io") {
		t.Errorf("the other protocols were removed: %s", got)
	}
}

// A response's cache TTL ends with its credential.
func TestTheCacheTTLEndsWithTheCredential(t *testing.T) {
	s := service()
	jwt := func(exp time.Time) string {
		return "eyJhbGciOiJub25lIn0." + encoded(fmt.Sprintf(`{"exp":%d}`, exp.Unix())) + ".x"
	}
	with := func(header, value string) http.Header { return http.Header{header: {value}} }
	const bootstrap = "abcdef.0123456789abcdef"
	hour := time.Now().Add(time.Hour)
	for name, x := range map[string]struct {
		headers      http.Header
		certificates []*x509.Certificate
		most, least  time.Duration
	}{
		"an opaque token":   {with("Authorization", "Bearer abc"), nil, 10 * time.Second, 10 * time.Second},
		"a bootstrap token": {with("Authorization", "Bearer "+bootstrap), nil, time.Second, time.Second},
		"a bootstrap token over a socket": {with("Sec-Websocket-Protocol", bearerProtocol+encoded(bootstrap)),
			nil, time.Second, time.Second},
		"a JWT":                     {with("Authorization", "Bearer "+jwt(hour)), nil, time.Second, time.Second},
		"a JWT, lower case":         {with("Authorization", "bearer "+jwt(hour)), nil, time.Second, time.Second},
		"a JWT before a third word": {with("Authorization", "Bearer "+jwt(hour)+" a.b"), nil, time.Second, time.Second},
		"a JWT over a socket": {with("Sec-Websocket-Protocol", bearerProtocol+encoded(jwt(hour))),
			nil, time.Second, time.Second},
		"a JWT that has ended": {with("Authorization", "Bearer "+jwt(time.Now().Add(-time.Second))), nil, 0, 0},
		"a certificate": {nil, []*x509.Certificate{{NotAfter: hour}},
			10 * time.Second, 10 * time.Second},
		"one that is about to end": {nil,
			[]*x509.Certificate{{NotAfter: time.Now().Add(2 * time.Second)}}, 2 * time.Second, time.Second},
		"one that has ended": {nil,
			[]*x509.Certificate{{NotAfter: time.Now().Add(-time.Hour)}}, 0, 0},
		"its issuer is to end": {nil,
			[]*x509.Certificate{{NotAfter: hour}, {NotAfter: time.Now().Add(-time.Hour)}}, 0, 0},
	} {
		if got := s.cacheTTL(x.headers, x.certificates); got > x.most || got < x.least {
			t.Errorf("%s: %v", name, got)
		}
	}
}

// An unread or stale informer may lack a bootstrap token's Secret. authn then rejects no bootstrap token as invalid.
func TestABootstrapTokenIsUndecidedWithoutItsSecret(t *testing.T) {
	const unknown, other = "abcdef.0123456789abcdef", "abc"
	for name, x := range map[string]struct {
		token   string
		enabled bool
		want    codes.Code
	}{
		"a bootstrap token": {unknown, true, codes.Unavailable},
		"another token":     {other, true, codes.OK},
		"disabled":          {unknown, false, codes.OK},
	} {
		s := service()
		s.config.Options.BootstrapToken.Enable = x.enabled
		for _, headers := range []http.Header{
			{"Authorization": {"Bearer " + x.token}},
			{
				"Sec-Websocket-Protocol": {bearerProtocol + encoded(x.token) + ", v4.channel.k8s.io"},
				"Connection":             {"Upgrade"},
				"Upgrade":                {"websocket"},
			},
		} {
			r := &authnv1.AuthenticateRequest{Headers: map[string]*commonv1.Values{}}
			for k, v := range headers {
				r.Headers[k] = &commonv1.Values{Values: v}
			}
			if resp, err := s.Authenticate(t.Context(), r); status.Code(err) != x.want || resp.GetAuthenticated() {
				t.Errorf("%s: %v, %v", name, resp, err)
			}
		}
		_, err := s.ReviewToken(t.Context(), &authnv1.ReviewTokenRequest{Token: x.token})
		if status.Code(err) != x.want {
			t.Errorf("%s: a review: %v", name, err)
		}
	}
}
