{{- define "sluice.name" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}-operator
{{- end -}}
{{- end -}}

{{- define "sluice.account" -}}
{{- .Values.serviceAccount.name | default (ternary (include "sluice.name" .) "default" .Values.serviceAccount.create) -}}
{{- end -}}

{{- define "sluice.selector" -}}
app.kubernetes.io/name: sluice-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "sluice.labels" -}}
{{ include "sluice.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- with .Values.labels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "sluice.image" -}}
{{- with .Values.image }}{{ .repository }}{{ if .digest }}@{{ .digest }}{{ else }}:{{ .tag }}{{ end }}{{ end -}}
{{- end -}}

{{- define "sluice.rules" -}}
- apiGroups: [sluice.dev]
  resources: [modeldeployments]
  verbs: [get, list, watch]
- apiGroups: [sluice.dev]
  resources: [modeldeployments/status, modeldeployments/scale]
  verbs: [get, patch]
- apiGroups: [apps]
  resources: [deployments]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [apps]
  resources: [replicasets]
  verbs: [list]
- apiGroups: [apps]
  resources: [controllerrevisions]
  verbs: [get, list, create, patch, delete]
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, patch, delete]
- apiGroups: [""]
  resources: [pods/status]
  verbs: [patch]
- apiGroups: [""]
  resources: [services]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [serviceaccounts, configmaps]
  verbs: [get, list, create, patch, delete]
# By name: never listed, watched or deleted. Certificates are renewed in their place.
- apiGroups: [""]
  resources: [secrets]
  verbs: [get, create, update]
- apiGroups: [""]
  resources: [events]
  verbs: [create]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [rbac.authorization.k8s.io]
  resources: [roles, rolebindings]
  verbs: [get, list, create, patch, delete]
# What gateways may do: nobody can give away what he has not.
- apiGroups: [discovery.k8s.io]
  resources: [endpointslices]
  verbs: [get, list, watch]
- apiGroups: [resource.k8s.io]
  resources: [resourceclaimtemplates]
  verbs: [get, list, create, patch, delete]
{{- if .Values.podMonitor.allow }}
- apiGroups: [monitoring.coreos.com]
  resources: [podmonitors]
  verbs: [get, list, create, patch, delete]
{{- end }}
{{- end -}}
